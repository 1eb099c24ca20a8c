"""Run a command: train, validate, test, or try out the rewards of a config.

How a run starts and ends is decided here; what happens in between belongs to Lightning and the
modules.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_grpo.cli.command_line import CommandLine, process_rank
from lit_grpo.cli.commands import REWARD_COMMANDS, TRAINING
from lit_grpo.cli.configs import read_invocation
from lit_grpo.cli.environment import log_overridden
from lit_grpo.cli.errors import broken_import, constructor_error, full_disk, print_error
from lit_grpo.cli.help import print_all_keys, print_help
from lit_grpo.cli.reward_commands import run_reward_command
from lit_grpo.cli.run_dir import choose_run_dir, with_run
from lit_grpo.rollout import EngineFailed
from lit_grpo.runs.log import log_to_terminal
from lit_grpo.runs.trainer import logged_run, refuse_automatic, silence_chatter
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training.base import PolicyModule
from lit_grpo.types import UserError

log = logging.getLogger(__name__)

USER_ERRORS = (ValueError, OSError, ImportError, MisconfigurationException)


def run(command: str, arguments: Sequence[str]) -> int:
    """Run one of the commands and return the exit code of the process.

    Raises:
        KeyboardInterrupt: Ctrl-C, at any time.
    """
    sys.path.insert(0, os.getcwd())  # for plugins next to the config
    silence_chatter()
    import_plugins()
    try:
        if {"-h", "--help"}.intersection(arguments):
            print_help(command)
            return ExitCode.DONE
        if "--help=all" in arguments:
            others = [argument for argument in arguments if argument != "--help=all"]
            print_all_keys(command, read_invocation(others))
            return ExitCode.DONE
        invocation = read_invocation(with_run(command, arguments))
        with choose_run_dir(command, invocation) as run_dir:
            return execute(CommandLine(command, invocation, run_dir))
    except SystemExit as leave:
        if isinstance(leave.__context__, KeyboardInterrupt):  # Lightning turned it into exit code 1
            raise KeyboardInterrupt from None
        raise
    except Exception as error:
        return report_error(error)


def execute(cli: CommandLine) -> int:
    """Run the command, close the engine and the rewards, and return the exit code."""
    try:
        if cli.command in TRAINING:
            return _train(cli)
        log_overridden(cli.overridden)
        if cli.command in REWARD_COMMANDS:
            return run_reward_command(cli)
        log_to_terminal()
        getattr(cli.trainer, cli.command)(**cli.fit_arguments)
        return ExitCode.DONE
    finally:
        if isinstance(cli.model, PolicyModule):
            cli.model.close()


def _train(cli: CommandLine) -> int:
    run_dir = Path(cli.config.run_dir)
    refuse_automatic(cli.trainer, cli.model)
    with logged_run(cli.trainer, run_dir, f"lit-grpo {cli.command} {shlex.quote(str(run_dir))}"):
        if process_rank() == 0:
            _save_config(cli, run_dir)
            log.info("run directory: %s", run_dir)
            for change in cli.changes:
                log.info("changed for this part of the run: %s", change)
        log_overridden(cli.overridden)
        cli.trainer.fit(**cli.fit_arguments)
    reason = get_stop_reason(cli.trainer)
    # Lightning kills rank 0 if a rank that it launched fails before rank 0 has ended.
    return ExitCode.DONE if reason is None or process_rank() > 0 else reason.exit_code


def _save_config(cli: CommandLine, run_dir: Path) -> None:
    """Write ``config.yaml``; a different one of an earlier part of the run is kept, numbered."""
    path = run_dir / "config.yaml"
    new = path.with_name(".config.yaml.partial")
    cli.parser.save(cli.saved_config, new, skip_unset=False, overwrite=True, multifile=False)
    if path.exists() and path.read_text() != new.read_text():
        earlier = (run_dir / f"config.{number}.yaml" for number in count())
        path.rename(next(one for one in earlier if not one.exists()))
    os.replace(new, path)


def import_plugins() -> None:
    """Import the plugins of installed packages, so that configs can use short class names."""
    for plugin in entry_points(group="lit_grpo.plugins"):
        try:
            plugin.load()
        except Exception as error:
            reason = broken_import(error) or error
            print(f"warning: plugin {plugin.value} is skipped: {reason}", file=sys.stderr)


def report_error(error: Exception) -> int:
    """Print an error and return its exit code.

    User errors and engine failures are printed as one line, anything else with a traceback.
    """
    error = constructor_error(error)
    if isinstance(error, EngineFailed):
        return print_error(str(error), ExitCode.ENGINE_FAILED)
    if line := full_disk(error):
        return print_error(line, ExitCode.CRASHED)
    if is_user_error(error):
        return print_error(str(error))
    traceback.print_exception(error)
    return ExitCode.CRASHED


def is_user_error(error: Exception) -> bool:
    """Return whether the config or the data is wrong, rather than the program.

    A ``UserError`` is always the user's. Before training, so are the errors that libraries raise
    for a bad path, class or value; during training, those are crashes.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_training = any(frame.name == "_run_stage" for frame in frames)
    return isinstance(error, UserError if is_training else USER_ERRORS)
