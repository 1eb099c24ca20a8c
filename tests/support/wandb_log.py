"""Read the file that wandb writes for a run; like wandb, only in processes of their own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768
HEADER = struct.Struct("<IHB")
"""Checksum, length and type of a piece: 1 is a whole record, 2 its first piece, 3, 4 its last."""
START = 7
"""Bytes before the first piece."""


def read_records(path: Path) -> Iterator[Record]:
    data, position, content = path.read_bytes(), START, b""
    while position + HEADER.size <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER.size:
            position += left
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        position += HEADER.size
        content += data[position : position + length]
        position += length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(content)
            yield record
            content = b""


def describe_end(directory: Path) -> str:
    """Return the exit code and the stop reason of the one run below a directory, as JSON."""
    (path,) = directory.glob("wandb/*run-*/*.wandb")
    exit_codes, summary = [], {}
    for record in read_records(path):
        if record.HasField("exit"):
            exit_codes.append(record.exit.exit_code)
        if record.HasField("summary"):
            summary |= {one.key: json.loads(one.value_json) for one in record.summary.update}
    return json.dumps({"exit_codes": exit_codes, "stop_reason": summary.get("stop_reason")})
