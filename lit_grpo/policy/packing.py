"""The rows of a batch as one row of tokens, in which every distinct prefix stands once.

So a prompt is run once a group and nothing is padded. Says which token stands where and which
tokens it sees; never runs a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lit_grpo.types import TrainBatch

SPLITS = 2
"""Attention runs in up to ``2**SPLITS`` blocks: each split pads less and calls more."""


class Block(NamedTuple):
    """R rows that attend in one call, padded to Q queries and K keys."""

    queries: Tensor
    """[R, Q] places in the pack; padding repeats a row's last query."""
    keys: Tensor
    """[R, K] places in the pack of a row's tokens from its first on."""
    positions: Tensor
    """[R, Q] which of the keys is the query's own token."""
    mask: Tensor | None
    """[R, 1, Q, K] True where a query sees a key; None where query q sees the first q + 1."""


class Layout(NamedTuple):
    """Which tokens of a pack see which."""

    blocks: tuple[Block, ...]
    restore: Tensor
    """[T] where each token stands among the blocks' queries, one block after the other."""


class Pack(NamedTuple):
    """The T distinct prefixes of a batch's rows, each as its last token. The last token of a
    completion predicts nothing and is left out.

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
    """[M] place in the pack of the token before each completion token, row after row."""

    def to(self, device: torch.device) -> Pack:
        """All but the predictors, which are sorted on the CPU."""
        blocks = tuple(
            Block(*(t if t is None else t.to(device) for t in block))  # type: ignore[arg-type]
            for block in self.layout.blocks
        )
        return Pack(
            ids=self.ids.to(device),
            position_ids=self.position_ids.to(device),
            layout=Layout(blocks, self.layout.restore.to(device)),
            predictors=self.predictors,
        )


class _Rows(NamedTuple):
    """Rows of which each adds to the pack what the one before it does not have."""

    lengths: Tensor
    """[N]"""
    shared: Tensor
    """[N] leading tokens that the row before it has as well."""
    places: Tensor
    """[N, L] where a row's tokens stand in the pack."""

    @property
    def fresh(self) -> Tensor:
        """[N] tokens that the row adds."""
        return self.lengths - self.shared

    def select(self, rows: Tensor) -> _Rows:
        return _Rows(*(tensor[rows] for tensor in self))

    @property
    def kinds(self) -> tuple[_Rows, _Rows]:
        """Those that share nothing, whose attention needs no mask, and the others; of both the rows
        that add a token."""
        alone, adds = self.shared == 0, self.fresh > 0
        return self.select(alone & adds), self.select(~alone & adds)


def pack(batch: TrainBatch, *, for_compile: bool = False) -> Pack:
    """The batch's tokens in one row and what a model needs to run over them, on the CPU.

    Args:
        for_compile: Lay out any batch alike, whatever is padded then, so that ``torch.compile``
            makes one program for all.
    """
    ids, prompts, lengths = _read_tokens(batch)
    order = _lexicographic(ids)
    rows, is_fresh = _rows(ids[order], lengths[order])
    blocks = (_two_blocks if for_compile else _similar_rows)(rows)
    before = prompts[:, None] - 1 + torch.arange(batch.completion_ids.shape[1])
    own_places = torch.empty_like(rows.places).index_copy(0, order, rows.places)
    return Pack(
        ids=ids[order][is_fresh][None],
        position_ids=is_fresh.nonzero()[:, 1][None],
        layout=_layout(blocks, int(is_fresh.sum())),
        predictors=own_places.gather(1, before)[batch.completion_mask.cpu()],
    )


def _read_tokens(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """[N, L] tokens of each row that the model reads with -1 behind them, [N] tokens of its
    prompt, [N] tokens in all."""
    index = batch.prompt_index
    ids = torch.cat([batch.prompt_ids[index], batch.completion_ids], 1).cpu()
    prompts = batch.prompt_mask.sum(1)[index].cpu()
    lengths = prompts + batch.completion_mask.sum(1).cpu() - 1
    column = torch.arange(ids.shape[1])
    padding = batch.prompt_ids.shape[1] - prompts[:, None]
    ids = ids.gather(1, (column + padding) % ids.shape[1])
    return ids.where(column < lengths[:, None], -1), prompts, lengths


def _lexicographic(ids: Tensor) -> Tensor:
    """[N] an order in which rows with a common beginning stand together."""
    keys = [row.tobytes() for row in ids.numpy()]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))


def _rows(ids: Tensor, lengths: Tensor) -> tuple[_Rows, Tensor]:
    """Rows in lexicographic order, and [N, L] True where a token is not shared with the row above.

    Less than an eighth of a row is not shared: attention that needs no mask is worth more.
    """
    same = (ids[1:] == ids[:-1]).long().cumprod(1).sum(1)
    shared = torch.cat([same.new_zeros(1), same]).minimum(lengths)
    shared = shared.where(8 * shared >= lengths, 0)
    column = torch.arange(ids.shape[1])
    is_fresh = (column >= shared[:, None]) & (column < lengths[:, None])
    numbers = (is_fresh.flatten().cumsum(0) - 1).view(ids.shape)
    # A shared token has the number of the one above it, and numbers grow downwards.
    places = numbers.where(is_fresh, 0).cummax(0).values
    return _Rows(lengths, shared, places), is_fresh


def _similar_rows(rows: _Rows) -> list[_Rows]:
    """Rows of a kind that are padded little together."""
    return [
        kind.select(part)
        for kind in rows.kinds
        if len(kind.lengths)
        for part in _split(kind.fresh.argsort(descending=True, stable=True), kind.fresh, SPLITS)
    ]


def _split(rows: Tensor, lengths: Tensor, splits: int) -> list[Tensor]:
    """Cut where it spares the most padding, if it spares an eighth, and each half again."""
    ordered = lengths[rows]
    spared = (ordered[0] - ordered) * torch.arange(len(rows), 0, -1)
    if splits == 0 or 8 * spared.max() < ordered[0] * len(rows):
        return [rows]
    cut = int(spared.argmax())
    return [*_split(rows[:cut], lengths, splits - 1), *_split(rows[cut:], lengths, splits - 1)]


def _two_blocks(rows: _Rows) -> list[_Rows]:
    """One block of rows that share nothing and one of the others, of two rows at least: the number
    of blocks and a side of length one are what compiled programs differ in."""
    alone, others = rows.kinds
    if len(others.lengths) == 0:  # the last token of the first row once more
        others = _Rows(rows.lengths[:1], rows.lengths[:1] - 1, rows.places[:1])
    return [
        block.select(torch.arange(max(2, len(n := block.lengths))) % len(n))
        for block in (alone, others)
    ]


def _layout(blocks: list[_Rows], num_tokens: int) -> Layout:
    restore, offset, laid = torch.empty(num_tokens, dtype=torch.long), 0, []
    for rows in blocks:
        block = _block(rows)
        real = torch.arange(block.queries.shape[1]) < rows.fresh[:, None]
        restore[block.queries[real]] = offset + real.flatten().nonzero()[:, 0]
        offset += real.numel()
        laid.append(block)
    return Layout(tuple(laid), restore)


def _block(rows: _Rows) -> Block:
    """Rows padded to the longest, with two queries at least."""
    fresh = rows.fresh[:, None]
    positions = rows.shared[:, None] + torch.arange(max(2, int(fresh.max()))).minimum(fresh - 1)
    keys = rows.places[:, : int(rows.lengths.max())]
    mask = None
    if rows.shared.any():
        mask = torch.arange(keys.shape[1]) <= positions[:, None, :, None]
    return Block(rows.places.gather(1, positions), keys, positions, mask)
