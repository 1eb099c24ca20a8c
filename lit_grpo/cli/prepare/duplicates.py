"""Find rows whose prompts have the same words, or nearly so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.data.rows.gold import contradict
from lit_grpo.data.rows.prepared import normalised_text

WORDS = 5
"""Length of the sequences of words that are compared."""
NUM_PERMUTATIONS = 128
CANDIDATES_FROM = 0.8
"""Candidates are looked for from this part of the threshold: just at its own threshold an
index misses up to one pair in five."""


def exact_copies(rows: Iterable[PreparedRow]) -> dict[str, str]:
    """Return the id of each row whose prompt an earlier row has, with the id of the first one."""
    first: dict[str, str] = {}
    found = {}
    for row in rows:
        if row.text_hash in first:
            found[row.id] = first[row.text_hash]
        first.setdefault(row.text_hash, row.id)
    return found


def contradictions(
    rows: Iterable[PreparedRow], copies: Mapping[str, str]
) -> list[tuple[PreparedRow, PreparedRow]]:
    """Return each copy whose gold answer differs from the original row's."""
    by_id = {row.id: row for row in rows}
    found = []
    for copy, first in copies.items():
        pair = by_id[copy], by_id[first]
        one, other = (row.columns.get("answer") for row in pair)
        if one is not None and other is not None and contradict(one, other):
            found.append(pair)
    return found


def near_copies(rows: Iterable[PreparedRow], threshold: float) -> dict[str, str]:
    """Return the id of each row that is nearly an earlier one, with the id of that.

    Two prompts are compared by their sequences of five words: the share that both have of those
    that one of them has must be the threshold or more. Candidates are found by MinHash. A row that
    is nearly an earlier one is no longer compared with later ones; equal prompts are left out.
    """
    from datasketch import MinHash, MinHashLSH

    # Rather too many candidates than a missed pair: each candidate is compared exactly.
    lower = CANDIDATES_FROM * threshold
    index = MinHashLSH(threshold=lower, num_perm=NUM_PERMUTATIONS, weights=(0.1, 0.9))
    kept: list[tuple[str, frozenset[str]]] = []
    seen: set[str] = set()
    found: dict[str, str] = {}
    for row in rows:
        if row.text_hash in seen:
            continue
        seen.add(row.text_hash)
        parts = _sequences(row.text)
        sketch = MinHash(num_perm=NUM_PERMUTATIONS, seed=1)
        sketch.update_batch([part.encode() for part in parts])
        for number in sorted(index.query(sketch)):
            other, others = kept[number]
            if len(parts & others) >= threshold * len(parts | others):
                found[row.id] = other
                break
        else:
            index.insert(len(kept), sketch)
            kept.append((row.id, parts))
    return found


def _sequences(text: str) -> frozenset[str]:
    words: Sequence[str] = normalised_text(text).split()
    starts = range(max(1, len(words) - WORDS + 1))
    return frozenset(" ".join(words[start : start + WORDS]) for start in starts)
