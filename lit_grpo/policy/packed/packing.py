"""Pack the rows of a batch into one row of tokens that holds every distinct prefix once.

A prompt therefore runs once per group, and nothing is padded outside attention. This module only
computes where each token is in the pack and which tokens it sees; attention uses either the blocks
of the layout or its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_grpo.types import TokenBatch

SPLITS = 2
"""Attention runs in up to ``2**SPLITS`` blocks of a kind; more blocks pad less but cost calls."""


class Block(NamedTuple):
    """R rows whose attention is computed in one call, padded to Q queries and K keys."""

    queries: Tensor
    """[R, Q] indices in the pack; padding repeats the last query of a row."""
    keys: Tensor
    """[R, K] indices in the pack of all tokens of a row, from its first."""
    positions: Tensor
    """[R, Q] the key that is the query's own token."""
    shares: bool
    """Whether its rows share a prefix; if not, query q sees the first q + 1 keys."""


class Rows(NamedTuple):
    """Sorted rows, each of which adds to the pack the tokens that it does not share.

    They are on the CPU. The added tokens of all rows, one row after the other, are the pack.
    """

    num_tokens: Tensor
    """[N]"""
    num_shared: Tensor
    """[N] leading tokens that the row shares with the row before it."""
    indices: Tensor
    """[N, L] index in the pack of each token of the row."""

    @property
    def num_added(self) -> Tensor:
        """[N] tokens that the row adds to the pack."""
        return self.num_tokens - self.num_shared

    def select(self, rows: Tensor) -> Rows:
        return Rows(*(tensor[rows] for tensor in self))

    def by_sharing(self) -> tuple[Rows, Rows]:
        """Return the rows that share no token, whose attention needs no mask, and the others.

        Rows that add no token are left out.
        """
        shares_none, adds = self.num_shared == 0, self.num_added > 0
        return self.select(shares_none & adds), self.select(~shares_none & adds)


class Layout(NamedTuple):
    """Which tokens of a pack see which others."""

    blocks: tuple[Block, ...]
    restore: Tensor
    """[T] index of each token among the queries of all blocks, one block after the other."""
    rows: Rows | None
    """None for ``torch.compile``, which needs fixed shapes: only the blocks have them."""
    derived: dict[Any, Any]
    """Values that attention computes from this layout in its first layer, for all others."""


class Pack(NamedTuple):
    """The T distinct prefixes of the rows of a batch, each represented by its last token.

    The last token of a completion predicts nothing and is left out.

    Example: prompt ``[5, 6]``, completions ``[7, 8, 9]`` and ``[7, 4]``::

        ids           [[5, 6, 7, 8]]
        position_ids  [[0, 1, 2, 3]]
        predictors    [1, 2, 3, 1, 2]
    """

    ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]"""
    layout: Layout
    predictors: Tensor
    """[M] index in the pack of the token before each completion token, row after row."""

    def to(self, device: torch.device) -> Pack:
        """Return the pack on a device, except for predictors and rows, which stay on the CPU."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        blocks = tuple(
            Block(move(block.queries), move(block.keys), move(block.positions), block.shares)
            for block in self.layout.blocks
        )
        restore = move(self.layout.restore)
        return Pack(
            ids=move(self.ids),
            position_ids=move(self.position_ids),
            layout=self.layout._replace(blocks=blocks, restore=restore, derived={}),
            predictors=self.predictors,
        )


def pack(batch: TokenBatch, *, for_compile: bool = False) -> Pack:
    """Return the tokens of a batch in one row, with their layout, on the CPU.

    Args:
        batch: On the CPU.
        for_compile: Give every batch the same layout at the cost of padding, so that
            ``torch.compile`` builds one program for all batches.
    """
    with torch.device("cpu"):  # while a model is loaded, Lightning makes its device the default
        ids, num_prompt_tokens, num_tokens = _left_aligned(batch)
        order = _lexicographic_order(ids)
        rows, is_added = _find_shared(ids[order], num_tokens[order])
        blocks = (_fixed_blocks if for_compile else _similar_blocks)(rows)
        before = num_prompt_tokens[:, None] - 1 + torch.arange(batch.completion_ids.shape[1])
        indices = torch.empty_like(rows.indices).index_copy(0, order, rows.indices)
        return Pack(
            ids=ids[order][is_added][None],
            position_ids=is_added.nonzero()[:, 1][None],
            layout=_layout(blocks, None if for_compile else rows, int(is_added.sum())),
            predictors=indices.gather(1, before)[batch.completion_mask],
        )


def _left_aligned(batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return [N, L] the tokens that the model reads, [N] prompt lengths and [N] row lengths.

    Rows start in the first column and end with padding of -1. The last token of each completion is
    left out because it predicts nothing.
    """
    index = batch.prompt_index
    ids = torch.cat([batch.prompt_ids[index], batch.completion_ids], 1)
    num_prompt_tokens = batch.prompt_mask.sum(1)[index]
    num_tokens = num_prompt_tokens + batch.completion_mask.sum(1) - 1
    column = torch.arange(ids.shape[1])
    padding = batch.prompt_ids.shape[1] - num_prompt_tokens[:, None]
    ids = ids.gather(1, (column + padding) % ids.shape[1])
    return ids.where(column < num_tokens[:, None], -1), num_prompt_tokens, num_tokens


def _lexicographic_order(ids: Tensor) -> Tensor:
    """Return [N] an order of the rows in which those with a common prefix are adjacent."""
    keys = [row.tobytes() for row in ids.numpy()]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))


def is_worth_sharing(num_shared: Tensor, num_tokens: Tensor) -> Tensor:
    """Return True where a row shares the prefix that it has in common with another one.

    Less than an eighth of the row is not shared, because attention without a mask saves more.

    Args:
        num_tokens: Tokens of the row, without the last one.
    """
    return 8 * num_shared >= num_tokens


def _find_shared(ids: Tensor, num_tokens: Tensor) -> tuple[Rows, Tensor]:
    """Return the sorted rows, and [N, L] True on the tokens not shared with the row above."""
    num_equal = (ids[1:] == ids[:-1]).long().cumprod(1).sum(1)
    num_shared = torch.cat([num_equal.new_zeros(1), num_equal]).minimum(num_tokens)
    num_shared = num_shared.where(is_worth_sharing(num_shared, num_tokens), 0)
    column = torch.arange(ids.shape[1])
    is_added = (column >= num_shared[:, None]) & (column < num_tokens[:, None])
    added_indices = (is_added.flatten().cumsum(0) - 1).view(ids.shape)
    # A shared token has the index of the token above it; indices grow from row to row.
    indices = added_indices.where(is_added, 0).cummax(0).values
    return Rows(num_tokens, num_shared, indices), is_added


def _similar_blocks(rows: Rows) -> list[Rows]:
    """Group rows into blocks that add similar numbers of tokens and so need little padding."""
    return [
        kind.select(part)
        for kind in rows.by_sharing()
        if len(kind.num_tokens)
        for part in _split(
            kind.num_added.argsort(descending=True, stable=True), kind.num_added, SPLITS
        )
    ]


def _split(rows: Tensor, lengths: Tensor, splits: int) -> list[Tensor]:
    """Split rows, sorted by descending length, recursively where this saves the most padding.

    A split has to save at least an eighth of the block.
    """
    ordered = lengths[rows]
    saved = (ordered[0] - ordered) * torch.arange(len(rows), 0, -1)
    if splits == 0 or 8 * saved.max() < ordered[0] * len(rows):
        return [rows]
    cut = int(saved.argmax())
    return [*_split(rows[:cut], lengths, splits - 1), *_split(rows[cut:], lengths, splits - 1)]


def _fixed_blocks(rows: Rows) -> list[Rows]:
    """Return one block of rows that share no token and one of the others, of two rows or more.

    ``torch.compile`` recompiles for a different number of blocks and for a dimension of size one.
    """
    shares_none, others = rows.by_sharing()
    if len(others.num_tokens) == 0:  # repeat the last token of the first row
        others = Rows(rows.num_tokens[:1], rows.num_tokens[:1] - 1, rows.indices[:1])
    return [
        block.select(torch.arange(max(2, len(n := block.num_tokens))) % len(n))
        for block in (shares_none, others)
    ]


def _layout(row_blocks: list[Rows], rows: Rows | None, num_tokens: int) -> Layout:
    restore, offset, blocks = torch.empty(num_tokens, dtype=torch.long), 0, []
    for block_rows in row_blocks:
        block = _block(block_rows)
        is_real = torch.arange(block.queries.shape[1]) < block_rows.num_added[:, None]
        restore[block.queries[is_real]] = offset + is_real.flatten().nonzero()[:, 0]
        offset += is_real.numel()
        blocks.append(block)
    return Layout(tuple(blocks), restore, rows, {})


def _block(rows: Rows) -> Block:
    """Return rows padded to the longest, with at least two queries each."""
    num_added = rows.num_added[:, None]
    query = torch.arange(max(2, int(num_added.max()))).minimum(num_added - 1)
    positions = rows.num_shared[:, None] + query
    keys = rows.indices[:, : int(rows.num_tokens.max())]
    shares = bool(rows.num_shared.any())
    return Block(rows.indices.gather(1, positions), keys, positions, shares)
