"""Attention to prompts that the rows of a group share, on a CPU, for one new token per row.

A row has the keys and values of its own tokens only; its prompt's exist once. Attention runs
over both parts separately, and the results are merged by their log-sum-exps, so that each token
reads a prompt once instead of once per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_grpo.policy.packed.packed_attention import autocast
from lit_grpo.rollout.hf.compaction import Compaction

SHARED = "shared_prompts"

MIN_SAVED_TOKENS = 2**11
"""Tokens of copies of prompts from which sharing saves more than merging the two parts costs."""


class SharedPrompts:
    """The keys and values of B prompts, and which of R rows continues which prompt.

    Args:
        mask: [B, P] True on the tokens of the prompts; None if none is padded.
        origin: [R] index of each row's prompt.
    """

    def __init__(self, mask: Tensor | None, origin: Tensor) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._bias = None
        """[B, 1, 1, P] 0 on the tokens of the prompts, minus infinity on padding."""
        if mask is not None:
            self._bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None, None]
        self._assign(origin)

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add [B, key heads, P, D] of a layer, which are changed when prompts are dropped."""
        keys, values = autocast(keys, values)  # once for all tokens
        self._layers[layer] = keys, values

    def __contains__(self, layer: int | None) -> bool:
        return layer in self._layers

    def keep(self, rows: Tensor) -> None:
        """Keep these rows in this order, and drop the prompts that no row continues.

        Args:
            rows: [R] their current indices.
        """
        origin = self._origin[rows]
        is_used = origin.bincount(minlength=self._num_prompts) > 0
        if not is_used.all():
            moves = Compaction(is_used, origin.device)
            for layer, (keys, values) in self._layers.items():
                moves.apply(keys)
                moves.apply(values)
                self._layers[layer] = keys[: moves.num_rows], values[: moves.num_rows]
            if self._bias is not None:
                self._bias = self._bias[moves.rows]
            now = torch.zeros_like(is_used, dtype=torch.long)
            now[moves.rows] = torch.arange(moves.num_rows)
            origin = now[origin]
        self._assign(origin)

    def _assign(self, origin: Tensor) -> None:
        """Give each row a place: prompt b has the places from ``b * width`` on."""
        num_rows = origin.bincount()
        self._origin, self._num_prompts, self._width = origin, len(num_rows), int(num_rows.max())
        order = origin.argsort(stable=True)
        first = num_rows.cumsum(0) - num_rows
        of_prompt = origin[order]
        places = of_prompt * self._width + torch.arange(len(origin)) - first[of_prompt]
        self._places = torch.empty_like(origin).index_copy(0, order, places)
        """[R] the place of each row."""
        rows = torch.zeros(self._num_prompts * self._width, dtype=torch.long)
        self._rows = rows.index_copy(0, places, order)
        """[B * width] the row at each place; the first one where there is none."""

    def attend(self, layer: int, query: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
        """Return [R, key heads, Q, D] outputs of attention to the prompts, for such queries.

        Also return [R, key heads, Q] log-sum-exps.
        """
        keys, values = self._layers[layer]
        placed = torch.unflatten(query[self._rows], 0, (-1, self._width)).transpose(1, 2)
        attended = attend(placed.flatten(2, 3), keys, values, scaling, self._bias)
        by_row = (torch.unflatten(one, 2, (self._width, -1)).transpose(1, 2) for one in attended)
        found, log_sums = (one.flatten(0, 1)[self._places] for one in by_row)
        return found, log_sums


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return [N, heads, Q, D] outputs of attention, and [N, heads, Q] log-sum-exps.

    Args:
        bias: [N, 1, 1, L] numbers to add to the scores.
    """
    attended, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        key,
        value,
        attn_mask=None if bias is None else bias.to(query.dtype),
        scale=scaling,
    )
    return attended, log_sums


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prompts: SharedPrompts | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [R, 1, heads, D] for queries [R, heads, 1, D] of one new token per row.

    A layer without shared prompts gets torch's own attention.

    Args:
        key: [R, key heads, L, D], as the values; where prompts are shared, of own tokens only.

    Raises:
        NotImplementedError: the model does not pass the prompts on, or needs a feature that is
            missing here.
    """
    layer: Any = getattr(module, "layer_idx", None)
    if prompts is None:
        raise NotImplementedError("its layers pass no further arguments to their attention")
    if layer not in prompts:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    given = {name for name, value in others.items() if value is not None and value is not False}
    if unknown := given - _NOT_ATTENTION:
        raise NotImplementedError(f"its attention uses {', '.join(sorted(unknown))}")
    query, key, value = autocast(query, key, value)
    # Query heads that share a key head become further queries of one head.
    grouped = torch.unflatten(query[:, :, 0], 1, (key.shape[1], -1))
    of_prompt, prompt_sum = prompts.attend(layer, grouped, scaling)
    own, own_sum = attend(grouped, key, value, scaling)
    weight = (prompt_sum - own_sum).sigmoid()[..., None].to(own.dtype)
    return own.lerp(of_prompt, weight).flatten(1, 2)[:, None], None


_NOT_ATTENTION = {"cache_position", "position_ids", "use_cache"}
"""Arguments that do not affect the result."""


AttentionInterface.register(SHARED, shared_attention)
AttentionMaskInterface.register(SHARED, sdpa_mask)
