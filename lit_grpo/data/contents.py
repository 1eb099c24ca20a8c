"""What rows contain, in a few characters, so that a resumed run can tell if they have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from lit_grpo.data.lazy_prompts import LazyPrompts
from lit_grpo.types import Prompt


def describe_rows(prompts: Sequence[Prompt] | LazyPrompts) -> str:
    """Return the number of the rows, and a checksum of their ids, prompts and gold answers.

    Rows that are read when they are needed have the hash that ``lit-grpo prepare`` gave them, in
    place of prompt and answer.
    """
    checksum = 0
    for content in _contents(prompts):
        checksum = crc32("\0".join(content).encode(errors="surrogatepass"), checksum)
    return f"{len(prompts):,} (checksum {checksum:08x})"


def _contents(prompts: Sequence[Prompt] | LazyPrompts) -> Iterable[tuple[str, ...]]:
    if isinstance(prompts, LazyPrompts):
        found = prompts.rows.columns("id", "text_hash")
        return (tuple(map(str, columns.values())) for columns in found)
    return ((one.id, one.text, one.answer or "") for one in prompts)
