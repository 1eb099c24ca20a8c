"""Describe the content of rows briefly, so that a resumed run can tell if they have changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast
from zlib import crc32

from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.types import Prompt
from lit_grpo.types.rollouts import Columns

READ_BYTES = 2**24


def describe_rows(prompts: Sequence[Prompt] | LazyPrompts) -> str:
    """Return the number of the rows, and a checksum of all that they contain.

    Of rows that are read when they are needed, these are their ids and the bytes of their file.
    """
    checksum = 0
    for content in _contents(prompts):
        checksum = crc32(content, checksum)
    return f"{len(prompts):,} (checksum {checksum:08x})"


def _contents(prompts: Sequence[Prompt] | LazyPrompts) -> Iterator[bytes]:
    if isinstance(prompts, LazyPrompts):
        yield from (one.encode(errors="surrogatepass") for one in prompts.ids())
        yield from _bytes_of(prompts.rows.path)
        return
    for one in prompts:
        # Objects of a program's own rows may be described in another way by each process.
        shared = cast(Columns, one.columns).shared()
        columns = json.dumps(shared, skipkeys=True, default=lambda value: type(value).__name__)
        content = "\0".join((one.id, one.text, one.answer or "", columns))
        yield content.encode(errors="surrogatepass")


def _bytes_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece
