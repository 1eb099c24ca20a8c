"""Errors that the command line prints without a traceback of its own."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard


class UserError(ValueError):
    """The config, the data or the environment is wrong, and the message says what to change.

    The command line prints the message as one line and exits with code 2, at startup and during
    training.
    """


class UserCodeFailed(RuntimeError):
    """A function of the user raised because of a bug; the message has its traceback."""


class EngineBug(UserCodeFailed):
    """An engine breaks its contract, or the user's own engine has a bug."""


class Diverged(FloatingPointError):
    """The policy's logits are no longer finite."""


class EngineFailed(RuntimeError):
    """The engine cannot recover, so the run ends with this message."""


class OutOfMemory(RuntimeError):
    """A stage needed more memory than there is; the message says which, and what to change."""


class RankLost(RuntimeError):
    """Another process of the run has ended, or does not answer, in a collective operation."""


class RankCrashed(RuntimeError):
    """Another process of the run crashed because of a bug; restarted, it would crash again."""


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt again that a library has replaced.

    Lightning turns it into SystemExit. ``torch.save``, which has to finish a file that was cut off,
    fails at that.
    """
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__context__
        if cause is None:
            raise
        raise KeyboardInterrupt from None


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether an error is due to a full disk or a full quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


GLOO_ERROR = re.compile(r"gloo/transport/\S+\] (?P<said>.+)")
NCCL_ERROR = re.compile(
    r"(?P<said>(ncclRemoteError|Watchdog caught collective operation timeout).*)"
)
STORE_ERRORS = ("DistNetworkError", "DistStoreError")
"""Errors of the store through which processes of torch.distributed find each other."""


def as_rank_lost(error: BaseException) -> RankLost | None:
    """Return an error of torch.distributed that is due to another process, in words for the user.

    Each backend has errors of its own for this; gloo's is a plain ``RuntimeError``. None if the
    error has another cause.
    """
    if isinstance(error, RankLost):
        return error
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    found = GLOO_ERROR.search(text) or NCCL_ERROR.search(text)
    if found is None and type(error).__name__ not in STORE_ERRORS:
        return None
    said = found["said"] if found else text.partition("\n")[0]
    said = said.partition(". This is typically")[0].strip().rstrip(".")
    limit = " (the timeout of trainer.strategy)" if "timed out" in said.lower() else ""
    return RankLost(
        f"another process of the run has ended or does not answer: {said}{limit}. Unless it was "
        "killed, the end of its output says why; ranks above 0 have a log of their own, "
        "run_rank1.log and so on. Start all processes again with --ckpt_path auto: the run goes on "
        "from its last checkpoint."
    )
