"""Append-only files of records that survive a kill at any moment, one file for each process.

A line is JSON with a checksum. Only the last line of a file can be cut off; it is then not read.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_grpo.types import UserError
from lit_grpo.types.errors import is_disk_full

SYNC_SECONDS = 1.0
"""How often records are forced to the disk, against a loss of power; a kill loses none."""
_CHECKSUM = b',"x":"%08x"}'
_TAIL = len(_CHECKSUM % 0)


class RecordFiles:
    """The files of a directory: this process appends to one of its own, and reads them all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / f"{platform.node()}-{os.getpid()}-{time.time_ns()}.jsonl"
        self._descriptor: int | None = None
        self._synced = 0.0
        self._read: dict[Path, int] = {}
        """File -> the number of its bytes that were read."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record; it is in the file when this returns.

        Raises:
            UserError: the disk is full.
        """
        line = _encode(record)
        try:
            if self._descriptor is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                self._descriptor = os.open(self._path, flags, 0o644)
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise UserError(
                f"{self._path} cannot be written: the disk is full; what was recorded before is "
                "kept. Free some space, and run the same command again."
            ) from error
        if time.monotonic() > self._synced + SYNC_SECONDS:
            os.fsync(self._descriptor)
            self._synced = time.monotonic()

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all files that were not read before, whichever process wrote them.

        Raises:
            UserError: a line is damaged.
        """
        for path in sorted(self.directory.glob("*.jsonl")):
            start = self._read.get(path, 0)
            if path.stat().st_size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break  # cut off by a kill, or not yet written to its end
                        yield self._decode(line, path)
                        self._read[path] = self._read.get(path, 0) + len(line)

    def close(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _decode(self, line: bytes, path: Path) -> dict[str, Any]:
        body, tail = line[: -_TAIL - 1] + b"}", line[-_TAIL - 1 : -1]
        if tail == _CHECKSUM % zlib.crc32(body):
            record: dict[str, Any] = json.loads(body)
            return record
        before = path.read_bytes()[: self._read.get(path, 0)].count(b"\n")
        raise UserError(
            f"{path}, line {before + 1}: the line must end with its checksum, got another (it was "
            "damaged after it was written). Remove the line; what it had is asked again."
        )


def _encode(record: Mapping[str, Any]) -> bytes:
    """Return ``{"k":"…","x":"8f1c02aa"}`` and a newline: x is the checksum of the rest."""
    body = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
    return body[:-1] + _CHECKSUM % zlib.crc32(body) + b"\n"
