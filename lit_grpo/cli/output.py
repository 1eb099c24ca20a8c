"""Output that outlives its reader (``lit-grpo fit | head``), without what libraries add to it."""

from __future__ import annotations

import errno
import io
import logging
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """A file descriptor that drops what nobody can read any more."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            return memoryview(data).nbytes


def silence_imports() -> None:
    """Silence what torchao logs when it is imported, as by transformers where it is installed.

    Call it before any of them is imported.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def outlive_readers() -> None:
    """Make stdout and stderr of this process drop output once their pipe or terminal is closed.

    Otherwise a training would end because ``head`` has seen enough of it.
    """
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
