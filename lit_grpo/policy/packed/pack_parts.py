"""The parts of the attention within a pack that need no mask, as pairs of sequences.

Every token sees its own row causally, and the whole prefix that its row shares. Rows that share the
same prefix form one sequence, so its keys are read once for all of them and never repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.policy.packed.packing import Rows

Where = slice | Tensor
"""Tokens of a pack: a range, or [n] indices."""


class Part(NamedTuple):
    """S sequences of queries, each of which attends to the sequence of keys of the same number.

    The form suits variable-length attention: the sequences follow each other.
    """

    queries: Where
    """Every token at most once."""
    keys: Where
    query_offsets: Tensor
    """[S + 1] int32, where among the queries each sequence starts, and their number."""
    key_offsets: Tensor
    """[S + 1] int32, the same for the keys."""
    max_queries: int
    max_keys: int
    """The longest sequences."""
    is_causal: bool
    """The last query sees all keys, the one before it all but the last, and so on; if not, every
    query sees all keys."""

    def to(self, device: torch.device) -> Part:
        """Return the part with its tensors on a device."""

        def move(one: Any) -> Any:
            return one.to(device, non_blocking=True) if isinstance(one, Tensor) else one

        return Part._make(map(move, self))


def full_parts(rows: Rows) -> list[Part]:
    """Return the parts of full attention; all tokens of the pack are queries of the first one.

    The second is what all rows of a tree share, usually the prompt of a group; the third is what
    some of them share beyond that, such as the first words of two completions.
    """
    adds = rows.num_added > 0
    parts = [_own_part(rows)]
    tree = (rows.num_shared == 0).cumsum(0) - 1
    shares = rows.num_shared > 0
    root = torch.full((len(tree),), rows.indices.shape[1])
    root = root.scatter_reduce(0, tree[shares], rows.num_shared[shares], "amin")[tree]
    start = torch.zeros_like(root)
    if (members := (shares & adds).nonzero()[:, 0]).numel():
        parts.append(_prefix_part(rows, members, tree, start, root))
    if (members := (shares & adds & (rows.num_shared > root)).nonzero()[:, 0]).numel():
        # The last token that a row shares identifies its prefix.
        last = rows.indices.gather(1, rows.num_shared.clamp(min=1)[:, None] - 1)[:, 0]
        parts.append(_prefix_part(rows, members, last, root, rows.num_shared))
    return parts


def window_parts(rows: Rows, window: int) -> list[Part]:
    """Return one part, in which every row has a copy of what its tokens see of its prefix."""
    column = torch.arange(rows.indices.shape[1])
    rows = rows.select(rows.num_added > 0)
    first = (rows.num_shared - window + 1).clamp(min=0)
    is_key = (column >= first[:, None]) & (column < rows.num_tokens[:, None])
    return [
        _own_part(rows)._replace(
            keys=_compact(rows.indices[is_key]),
            key_offsets=_offsets(rows.num_tokens - first),
            max_keys=int((rows.num_tokens - first).max()),
        )
    ]


def _own_part(rows: Rows) -> Part:
    """Return the part in which every row attends causally to the tokens that it adds."""
    lengths = rows.num_added[rows.num_added > 0]
    everything, offsets, longest = slice(0, int(lengths.sum())), _offsets(lengths), lengths.max()
    return Part(everything, everything, offsets, offsets, int(longest), int(longest), True)


def _prefix_part(rows: Rows, members: Tensor, prefix: Tensor, start: Tensor, stop: Tensor) -> Part:
    """Return the part in which rows attend to the tokens [start, stop) of themselves.

    Args:
        members: [n] numbers of rows.
        prefix: [N] rows of the same prefix have the same number.
        start: [N]
        stop: [N]
    """
    _, sequence = torch.unique(prefix[members], return_inverse=True)
    num_sequences = int(sequence.max()) + 1
    members, sequence = members[order := sequence.argsort(stable=True)], sequence[order]
    column = torch.arange(rows.indices.shape[1])
    of_members = rows.select(members)
    is_query = (column >= of_members.num_shared[:, None]) & (
        column < of_members.num_tokens[:, None]
    )
    num_queries = torch.zeros(num_sequences, dtype=torch.long)
    num_queries.index_add_(0, sequence, of_members.num_added)
    one = torch.empty(num_sequences, dtype=torch.long).index_copy_(0, sequence, members)
    is_key = (column >= start[one, None]) & (column < stop[one, None])
    num_keys = stop[one] - start[one]
    return Part(
        queries=_compact(of_members.indices[is_query]),
        keys=_compact(rows.indices[one][is_key]),
        query_offsets=_offsets(num_queries),
        key_offsets=_offsets(num_keys),
        max_queries=int(num_queries.max()),
        max_keys=int(num_keys.max()),
        is_causal=False,
    )


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _compact(indices: Tensor) -> Where:
    """Return a range, which needs no copy, instead of consecutive indices."""
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices) and bool((indices.diff() == 1).all()):
        return slice(first, last + 1)
    return indices
