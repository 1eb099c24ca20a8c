"""Attention within a pack from parts without masks, merged by their log-sum-exps.

Only queries, keys, values, the result and its log-sum-exp are kept for the backward pass, each
token once. Every part runs in variable-length FlashAttention, which a GPU has for 16 bits.

Softmax over the union of several sets of keys is the mean of the softmaxes over each, weighted by
the exponentials of their log-sum-exps. No operator of torch has a gradient through its log-sum-exp,
and none is needed: the backward pass of FlashAttention computes probabilities from the scores and
the log-sum-exp. Given the log-sum-exps of the merged result, each part gets its exact share of the
gradient (as in ring attention, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_grpo.policy.packed.pack_parts import Part, Where

aten = torch.ops.aten


def merged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    *,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Return [1, T, heads, D] for queries, keys and values [1, heads, T, D].

    Args:
        parts: All tokens are queries of the first one.
        window: Every token sees so many, itself included.
    """
    tokens = (states[0].transpose(0, 1) for states in (query, key, value))
    merged: Any = _MergedAttention.apply  # torch does not annotate it
    attended: Tensor = merged(*tokens, parts, window, scaling)
    return attended[None]


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        parts: Sequence[Part],
        window: int | None,
        scaling: float | None,
    ) -> Tensor:
        ctx.parts, ctx.options = parts, _options(window, scaling)
        first, *others = parts
        out, lse = _attend(query, key, value, first, ctx.options)
        for part in others:
            merge(out, lse, part.queries, *_attend(query, key, value, part, ctx.options))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.to(out.dtype).contiguous()
        totals = _Totals(query, key, value)
        for part in ctx.parts:
            at = part.queries
            merged = grad[at], out[at], lse[:, at].contiguous()
            totals.add(part, _gradients(query, key, value, *merged, part, ctx.options))
        return totals.query, totals.key.to(key.dtype), totals.value.to(value.dtype), *[None] * 3


class _Totals:
    """Gradients summed over the parts; of the keys, which rows have in common, in float32."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.query = torch.zeros_like(query)
        self.key = torch.zeros_like(key, dtype=torch.float32)
        self.value = torch.zeros_like(value, dtype=torch.float32)

    def add(self, part: Part, gradients: Sequence[Tensor]) -> None:
        places = (part.queries, part.keys, part.keys)
        for total, at, gradient in zip(
            (self.query, self.key, self.value), places, gradients, strict=True
        ):
            if isinstance(at, slice):
                total[at] += gradient
            else:
                total.index_add_(0, at, gradient.to(total.dtype))


def merge(out: Tensor, lse: Tensor, at: Where, other: Tensor, other_lse: Tensor) -> None:
    """Add in place what n of the queries get from more keys.

    Args:
        out: [T, heads, D]
        lse: [heads, T] in float32.
        at: Which n queries.
        other: [n, heads, D]
        other_lse: [heads, n]
    """
    total = torch.logaddexp(lse[:, at], other_lse)
    before, after = ((one - total).exp().t()[..., None] for one in (lse[:, at], other_lse))
    out[at] = (out[at] * before).addcmul_(other, after).to(out.dtype)
    lse[:, at] = total


def _options(window: int | None, scaling: float | None) -> dict[str, Any]:
    sides = (-1, -1) if window is None else (window - 1, 0)
    return {"scale": scaling, "window_size_left": sides[0], "window_size_right": sides[1]}


def _sizes(part: Part) -> tuple[int, int]:
    """Return the longest sequences; for queries of length one the kernel has a way without lse."""
    return max(2, part.max_queries), part.max_keys


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: Part, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return [n, heads, D] and the log-sum-exps [heads, n] of the n queries of a part."""
    out, lse, *_ = aten._flash_attention_forward(
        query[part.queries],
        key[part.keys],
        value[part.keys],
        part.query_offsets,
        part.key_offsets,
        *_sizes(part),
        0.0,
        part.is_causal,
        False,
        **options,
    )
    return out, lse


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    part: Part,
    options: dict[str, Any],
) -> Sequence[Tensor]:
    """Return the gradients of the queries, keys and values of a part."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    gradients: Sequence[Tensor] = aten._flash_attention_backward(
        grad,
        query[part.queries],
        key[part.keys],
        value[part.keys],
        out,
        lse,
        part.query_offsets,
        part.key_offsets,
        *_sizes(part),
        0.0,
        part.is_causal,
        no_dropout,
        no_dropout.new_empty(0),
        **options,
    )
    return gradients
