"""The command ``lit-grpo``: print help, or import the module of a command and run it.

Heavy imports wait until the command is known, so that ``--help`` answers at once.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from lit_grpo import __version__
from lit_grpo.cli.commands import (
    COMMANDS,
    OTHER_NAMES,
    OWN_EXIT_CODES,
    TRAINING,
    WITHOUT_CONFIG,
    bundled_configs,
    describe,
    examples,
    usage,
)
from lit_grpo.cli.errors import print_error
from lit_grpo.cli.output import ignore_closed_output, lost_output, silence_imports
from lit_grpo.stopping import (
    ExitCode,
    end_with_launcher,
    exit_code_of_signal,
    exit_codes,
)

SHUTDOWN_SECONDS = 15.0
SIGNAL_BASE = exit_code_of_signal(0)
ASKS_FOR_HELP = ("-h", "--help", "--help=all")

HELP = """\
usage: lit-grpo COMMAND [RUN] [--config FILE ...] [--KEY VALUE ...]

commands:
{commands}

examples:
{examples}

bundled configs (a file of the same name in the working directory takes precedence):
{configs}

exit codes:
{exit_codes}
  A callback that stops a run may choose a different code.

exit codes with a further meaning:
{own_exit_codes}

`lit-grpo COMMAND --help` describes a command and lists its keys, `lit-grpo --version` prints the
version, and `lit-grpo --print_completion bash` (or zsh, fish, tcsh) prints a completion script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default from this process's arguments; return the exit code."""
    if argv is None:
        ignore_closed_output()
        argv = sys.argv[1:]
    command, *arguments = argv or ["--help"]
    is_run = command in TRAINING
    silence_imports()
    try:
        exit_code = dispatch(command, arguments)
    except SystemExit as leave:
        is_signal = isinstance(leave.code, int) and leave.code > SIGNAL_BASE
        if not is_signal and lost_output() is None:
            raise  # of the parser, such as after --print_config
        exit_code = leave.code if isinstance(leave.code, int) else ExitCode.DONE
        is_run = is_run and is_signal
    except KeyboardInterrupt:
        exit_code = print_error("interrupted.", ExitCode.INTERRUPTED)
    if (lost := lost_output()) is not None:
        exit_code = tell_lost_output(lost, exit_code, is_run=is_run)
    end_within(SHUTDOWN_SECONDS, exit_code)
    return exit_code


def dispatch(command: str, arguments: list[str]) -> int:
    if command in ASKS_FOR_HELP:
        print(help_text())
    elif command == "--version":
        print(f"lit-grpo {__version__}")
    elif command == "--print_completion":
        from lit_grpo.cli.completion import print_completion

        return print_completion(arguments)
    elif command in WITHOUT_CONFIG:
        return run_without_config(command, arguments)
    elif command in COMMANDS and {"-h", "--help"}.intersection(arguments):
        from lit_grpo.cli.help import print_help

        print_help(command)
    elif command in COMMANDS:
        end_with_launcher()
        with importing():
            from lit_grpo.cli.app import run

        return run(command, arguments)
    else:
        with importing():
            from lit_grpo.types.spelling import did_you_mean

        hint = f" Did you mean {meant}?" if (meant := OTHER_NAMES.get(command)) else ""
        hint = hint or did_you_mean(command, [*COMMANDS, "--version", "--help"])
        first = " Put the command before its options." if command.startswith("-") else ""
        hint = hint or f"{first} Choose from {', '.join(COMMANDS)}."
        return print_error(f"{command}: no such command.{hint}")
    return ExitCode.DONE


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection during imports, which saves a fifth of the time.

    What was imported is never collected. Ctrl-C ends the process at once: a package may swallow an
    exception within its import. Do nothing if the process has imported it already: then other
    objects would never be collected either.
    """
    if "lit_grpo.cli.app" in sys.modules:
        yield
        return
    gc.disable()
    try:
        with exiting_at_once():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def exiting_at_once() -> Iterator[None]:
    """End the process at Ctrl-C without an exception.

    Do nothing in a notebook, or where a caller handles the signal.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"error: interrupted.\n")  # print would fail within another print
        os._exit(ExitCode.INTERRUPTED)

    handler = signal.getsignal(signal.SIGINT)
    is_default = handler is signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_default or not is_main or "ipykernel" in sys.modules:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def help_text() -> str:
    own = [
        f"  {name:<13}{code}  {meaning}"
        for name, codes in OWN_EXIT_CODES.items()
        for code, meaning in codes.items()
    ]
    return HELP.format(
        commands="\n".join(f"  {name:<13}{purpose}" for name, purpose in COMMANDS.items()),
        examples="\n".join(map(examples, COMMANDS)),
        configs="\n".join(f"  {name}" for name in bundled_configs()) or "  (none)",
        exit_codes="\n".join(f"  {code:<9}{meaning}" for code, meaning in exit_codes().items()),
        own_exit_codes="\n".join(own),
    )


def run_without_config(command: str, arguments: list[str]) -> int:
    """Run a command that takes options of its own and no config."""
    if {*ASKS_FOR_HELP}.intersection(arguments):
        print(f"usage: {usage(command)}\n\n{describe(command)}")
        return ExitCode.DONE
    try:
        if command == "prepare":
            from lit_grpo.cli.prepare.command import prepare

            return prepare(arguments)
        if command == "precompute":
            from lit_grpo.cli.precompute.command import precompute

            return precompute(arguments)
        if command == "analyze":
            from lit_grpo.cli.analyze.command import analyze

            return analyze(arguments)
        if command == "checkpoints":
            from lit_grpo.cli.checkpoints import manage_checkpoints

            return manage_checkpoints(arguments)
        if command == "wandb-sync":
            from lit_grpo.cli.wandb_sync import sync_wandb

            return sync_wandb(arguments)
        report(arguments)
    except (ValueError, OSError) as error:  # UserError, and of libraries that read damaged files
        return print_error(str(error))
    return ExitCode.DONE


def report(arguments: list[str]) -> None:
    """Draw the runs in these directories and print a summary."""
    from lit_grpo.cli.file_options import parse_runs

    given = parse_runs("report", arguments)
    from lit_grpo.runs.report.report import follow, report

    if given.follow:
        follow(given.run_dirs, given.every, read_up_to=given.steps)
    else:
        report(given.run_dirs, read_up_to=given.steps)


def tell_lost_output(lost: OSError, exit_code: int, *, is_run: bool) -> int:
    """Say that what was printed could not be written; return the exit code of the command.

    Args:
        is_run: Whether it was a training, which writes the same to ``run.log``. Of other commands
            it is the result.
    """
    line = f"standard output could not be written ({lost.strerror})"
    if is_run:
        print_error(f"{line}, but the run did not need it: its run.log has what was printed.")
        return exit_code
    print_error(f"{line}. Free space where it goes, and repeat the command.")
    return exit_code or ExitCode.CRASHED


def end_within(seconds: float, exit_code: int) -> None:
    """End the process with its exit code even if a thread or a logger hangs at shutdown."""

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        os._exit(exit_code)

    sys.stdout.flush()
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
