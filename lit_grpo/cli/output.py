"""Keep a command running when its output is closed (``lit-grpo fit | head``) or cannot be written.

It also silences imports.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Output(io.FileIO):
    """A file descriptor that drops output once its pipe or terminal is closed, or its disk full."""

    lost: OSError | None = None
    """The error by which output was lost, other than a closed pipe or terminal."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in FULL:
                self.lost = error
            elif error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(data).nbytes


def lost_output() -> OSError | None:
    """Return why some of what was printed is lost; None if nothing is."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, _Output) else None


def silence_imports() -> None:
    """Silence what torchao logs when it is imported, for example by transformers.

    Call this before either of them is imported.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def ignore_closed_output() -> None:
    """Make stdout and stderr of this process drop output once their pipe or terminal is closed.

    Otherwise ``lit-grpo fit | head`` would end the training with ``head``, and a full disk under
    ``lit-grpo fit > file`` would end it, too.
    """
    sys.stdout, sys.stderr = _dropping(sys.stdout, 1), _dropping(sys.stderr, 2)


def _dropping(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is None:  # it was closed before the start (``>&-``): a file could get its number
        null = os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        stream = open(descriptor, "w", closefd=False)  # noqa: PTH123, SIM115
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
