"""Find the cause of an error that has ended a run."""

from __future__ import annotations

from lit_grpo.diagnostics.causes.table import CAUSES, cause_of_exit
from lit_grpo.diagnostics.memory import is_out_of_memory
from lit_grpo.stopping import exit_code_of_error
from lit_grpo.types.errors import OutOfMemory, is_disk_full


def cause_of_error(error: BaseException) -> str:
    """Return the name of its cause, as `cause_of_exit` does where the exit code is all."""
    if _find_full_disk(error) is not None:
        return "disk_full"
    if isinstance(error, OutOfMemory) or is_out_of_memory(error):
        return "out_of_memory"
    return cause_of_exit(exit_code_of_error(error))


def describe_full_disk(error: BaseException) -> str | None:
    """Return a line on an error that a full disk has caused; None for other errors."""
    full = _find_full_disk(error)
    if full is None:
        return None
    file = f": {full.filename}" if full.filename else ""
    return (
        f"the disk is full{file}. Checkpoints that were written before are intact. "
        f"{CAUSES['disk_full'].remedy}"
    )


def _find_full_disk(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk, or of a full quota, that is behind an error."""
    while error is not None:
        if is_disk_full(error):
            return error
        error = error.__cause__ or error.__context__
    return None
