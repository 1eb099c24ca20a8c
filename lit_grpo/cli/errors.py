"""Print errors as one readable line, and find the cause of errors that libraries wrap.

``app`` decides whether an error is the user's; ``parser_errors`` rewords the parser's.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from pathlib import Path

from lit_grpo.stopping import ExitCode


def print_error(line: str, exit_code: int = ExitCode.WRONG_INPUT) -> int:
    """Print one line to stderr, in colour on a terminal, and return the exit code."""
    is_plain = not sys.stderr.isatty() or "NO_COLOR" in os.environ
    label = "error:" if is_plain else "\033[1;31merror:\033[0m"
    print(label, one_line(line), file=sys.stderr)
    return exit_code


def one_line(text: str) -> str:
    return " ".join(text.split())


def constructor_error(error: Exception) -> Exception:
    """Return what a constructor raised, if jsonargparse wrapped it as a failed alternative."""
    while str(error).startswith("Does not validate against") and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    return error


def broken_import(error: BaseException | None) -> str | None:
    """Describe an error that a module raised while it was imported; None for other errors."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, SyntaxError):
            return f"{place(error.filename, error.lineno)}: {type(error).__name__}: {error.msg}"
        if any(frame.name == "<module>" for frame in frames):
            last = frames[-1]
            return f"{place(last.filename, last.lineno)}: {type(error).__name__}: {error}"
        error = error.__cause__
    return None


def reworded(message: str) -> str:
    """Return a library's message with the setting to change, where it lacks one."""
    from lit_grpo.types import setting_error  # loads torch, for which --help does not wait

    if message.startswith("No supported gpu backend found"):
        from lit_grpo.runs.trainer_settings import NO_GPU

        return NO_GPU
    if devices := re.match(r"`Trainer\(devices=(.+)\)` value is not a valid input", message):
        rule = "auto, or the number of devices from 1 on"
        return str(setting_error("trainer.devices", rule, devices[1].strip("'")))
    if message.startswith("No API key configured"):
        return (
            "wandb needs a login, and there is none. Run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to upload later."
        )
    return message


def place(filename: str | None, line: int | None) -> str:
    path = Path(filename or "?")
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}, line {line}"
