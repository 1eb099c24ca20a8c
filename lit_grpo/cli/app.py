"""Run a command: train, validate, test, or try out the rewards of a config.

This module decides how a run starts and ends; Lightning and the modules do the rest.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.cli.command_line import CommandLine, process_rank
from lit_grpo.cli.commands import CHECKING, PLANNING, REWARD_COMMANDS, TRAINING
from lit_grpo.cli.errors import (
    broken_import,
    constructor_error,
    print_error,
    reworded,
)
from lit_grpo.cli.help import print_all_keys
from lit_grpo.cli.parsing.config_changes import describe_other_holdout
from lit_grpo.cli.parsing.environment import log_overridden
from lit_grpo.cli.parsing.invocation import read_invocation
from lit_grpo.cli.rewards.commands import run_reward_command
from lit_grpo.cli.run_dir import choose_run_dir, where_started, with_run
from lit_grpo.data.module import PromptDataModule, Split
from lit_grpo.diagnostics.errors import describe_full_disk
from lit_grpo.diagnostics.memory import describe_out_of_memory, is_out_of_memory
from lit_grpo.rollout import EngineFailed
from lit_grpo.runs.files.log import log_to_terminal
from lit_grpo.runs.launcher import ends_with_rank_0
from lit_grpo.runs.run_log import logged_run, silence_chatter
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import (
    ExitCode,
    exit_code_of_error,
    get_stop_reason,
    is_of_signal,
)
from lit_grpo.training.base import PolicyModule
from lit_grpo.training.checks.trainer_features import refuse_automatic
from lit_grpo.types import RankLost, UserCodeFailed, UserError
from lit_grpo.types.errors import (
    Diverged,
    OutOfMemory,
    RankCrashed,
    as_rank_lost,
    keeping_interrupts,
)
from lit_grpo.types.functions import users_line

log = logging.getLogger(__name__)

USER_ERRORS = (ValueError, OSError, ImportError, MisconfigurationException)


def run(
    command: str, arguments: Sequence[str], work: Callable[[CommandLine], int] | None = None
) -> int:
    """Run one of the commands and return the exit code of the process.

    Args:
        command: Its name.
        arguments: Its arguments.
        work: Takes the built objects and returns the exit code; None runs the command itself.

    Raises:
        KeyboardInterrupt: Ctrl-C, at any time.
    """
    sys.path.insert(0, os.getcwd())  # for the user's code
    silence_chatter()
    import_plugins()
    try:
        if "--help=all" in arguments:
            others = [argument for argument in arguments if argument != "--help=all"]
            print_all_keys(command, read_invocation(others))
            return ExitCode.DONE
        invocation = read_invocation(with_run(command, arguments))
        sys.path[1:1] = invocation.directories
        with choose_run_dir(command, invocation) as run_dir:
            with as_user_errors():
                cli = CommandLine(command, invocation, run_dir)
            with as_user_errors(until=lambda: getattr(cli.model, "has_begun", True)):
                return execute(cli, work)
    except SystemExit as leave:
        if is_of_signal(exit_code_of_error(leave)) or not (where := users_line(leave)):
            raise  # of the parser, such as after --print_config
        return print_error(
            f"your code{where} called sys.exit({leave.code!r}), which ended the command, and "
            "nothing was saved after it. Remove the call, or move what the file does as a script "
            "under if __name__ == '__main__'.",
            ExitCode.CRASHED,
        )
    except Exception as error:
        text = str(constructor_error(error))
        return report_error(error, where_started(command, arguments, text))


@keeping_interrupts()
def execute(cli: CommandLine, work: Callable[[CommandLine], int] | None = None) -> int:
    """Do the work, close the engine and the rewards, and return the exit code."""
    try:
        return (work or _work)(cli)
    finally:
        if isinstance(cli.model, PolicyModule):
            cli.model.close()


def _work(cli: CommandLine) -> int:
    if cli.command in TRAINING:
        return _train(cli)
    if cli.command == CHECKING:
        from lit_grpo.cli.doctor.command import run_doctor

        return run_doctor(cli)
    if cli.command == PLANNING:
        from lit_grpo.cli.plan.command import run_plan

        return run_plan(cli)
    log_overridden(cli.overridden)
    if cli.command in REWARD_COMMANDS:
        return run_reward_command(cli)
    _evaluate(cli)
    return ExitCode.DONE


def _evaluate(cli: CommandLine) -> None:
    log_to_terminal()
    rank_zero_only(log.info)("evaluating %s", cli.config.ckpt_path or _initial_model(cli))
    split: Split = "test" if cli.command == "test" else "validation"
    data = cli.datamodule
    is_held_out = isinstance(data, PromptDataModule) and data.is_held_out_of_train(split)
    if is_held_out and (warning := describe_other_holdout(cli.changes)):
        rank_zero_only(log.warning)(warning)
    (metrics,) = getattr(cli.trainer, cli.command)(**cli.fit_arguments, verbose=False)
    table = make_table("metric")
    add_numbers(table, "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.3f}")
    rank_zero_only(open_console().print)(table)


def _initial_model(cli: CommandLine) -> str:
    """Name the model that is evaluated without a checkpoint."""
    name = "the model"
    if isinstance(cli.model, PolicyModule):
        name = cli.model.policy.path or "random weights (model.policy.architecture)"
    return f"{name}, since no checkpoint was given (--ckpt_path)"


def _train(cli: CommandLine) -> int:
    run_dir = Path(cli.config.run_dir)
    refuse_automatic(cli.trainer, cli.model)
    cli.model.allow_changes = cli.config.allow_changes
    cli.model.changes = [str(change) for change in cli.changes]
    with logged_run(cli.trainer, run_dir.absolute(), cli.resume_command):
        if process_rank() == 0:
            log.info("run directory: %s", run_dir)
            for change in cli.model.changes:
                log.info("changed for this part of the run: %s", change)
        log_overridden(cli.overridden)
        cli.trainer.fit(**cli.fit_arguments)
    reason = get_stop_reason(cli.trainer)
    if reason is None:
        _print_next_command(cli.command, run_dir)
    # Lightning kills rank 0 if a rank that it launched fails before rank 0 has ended.
    return ExitCode.DONE if reason is None or process_rank() > 0 else reason.exit_code


@rank_zero_only
def _print_next_command(command: str, run_dir: Path) -> None:
    """Print what to run after a successful training: its report, and GRPO after SFT."""
    if (run_dir / "metrics.csv").exists():
        log.info("Curves and a summary: lit-grpo report %s", shlex.quote(str(run_dir)))
    if command == "sft" and (run_dir / "final").is_dir():
        final = shlex.quote(str(run_dir / "final"))
        log.info("GRPO from here: lit-grpo fit --config my.yaml --model.policy.path %s", final)


def import_plugins() -> None:
    """Import the plugins of installed packages, so that configs can use short class names."""
    for plugin in entry_points(group="lit_grpo.plugins"):
        try:
            plugin.load()
        except Exception as error:
            reason = broken_import(error) or error
            print(f"warning: plugin {plugin.value} is skipped: {reason}", file=sys.stderr)


def report_error(error: Exception, hint: str = "") -> int:
    """Print an error and return its exit code.

    Errors whose cause is known are printed as one line, others with a traceback. A rank that rank
    0 has started prints only what rank 0 does not.

    Args:
        hint: Printed after an error of the user's.
    """
    error = constructor_error(error)
    error = as_rank_lost(error) or error
    if ends_with_rank_0():
        return exit_code_of_error(error)
    if isinstance(error, EngineFailed):
        return print_error(str(error), exit_code_of_error(error))
    if isinstance(error, UserCodeFailed):
        print(f"error: {error}", file=sys.stderr)  # its lines are the traceback of the user's code
        return ExitCode.CRASHED
    if line := describe_full_disk(error):
        return print_error(line, ExitCode.CRASHED)
    if is_out_of_memory(error):
        error = OutOfMemory(describe_out_of_memory("", error))
    if isinstance(error, UserError):
        return print_error(f"{error}{hint}")
    if isinstance(error, OutOfMemory | Diverged | RankLost | RankCrashed):
        return print_error(str(error), exit_code_of_error(error))
    traceback.print_exception(error)
    return ExitCode.CRASHED


@contextmanager
def as_user_errors(until: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn the errors that libraries raise for a bad path, class or value into ``UserError``.

    Args:
        until: Whether training has begun, so that such an error is a crash.
    """
    try:
        yield
    except Exception as error:
        cause = constructor_error(error)
        if not isinstance(cause, USER_ERRORS) or until():
            raise
        of_user = "" if isinstance(cause, UserError | ImportError) else users_line(cause)
        said = f"{type(cause).__name__}: {cause}{of_user}" if of_user else reworded(str(cause))
        raise UserError(said) from cause
