"""Variable-length FlashAttention for the CPU, computed plainly, in place of the one of a GPU.

`install` registers it for the two operators of torch that have it on a GPU only. Sequences are
computed one by one; the backward pass takes the log-sum-exp and the result that it is given, as
FlashAttention's does.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def install() -> None:
    """Register the two operators for the rest of the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    install.library = library  # type: ignore[attr-defined]  # it lasts as long as this object


def forward(q, k, v, starts_q, starts_k, max_q, max_k, dropout, is_causal, debug, **options):
    check(q, k, v, starts_q, starts_k, max_q, max_k, dropout)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for rows, columns in sequences(starts_q, starts_k):
        scores = scores_of(q[rows], k[columns], is_causal, **options)
        lse[:, rows] = scores.logsumexp(-1).float()
        values = repeated(v[columns], q)
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
    empty = q.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), empty, empty


def backward(grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, *rest, **options):
    dropout, is_causal, _, _ = rest
    check(q, k, v, starts_q, starts_k, max_q, max_k, dropout)
    assert grad.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q))
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    grads = [torch.zeros_like(one) for one in (q, k, v)]
    scale = options.get("scale") or q.shape[-1] ** -0.5
    delta = (grad.float() * out.float()).sum(-1).t()[..., None]
    for rows, columns in sequences(starts_q, starts_k):
        scores = scores_of(q[rows], k[columns], is_causal, **options)
        weights = (scores - lse[:, rows, None]).exp()
        flow = grad[rows].transpose(0, 1).to(weights.dtype)
        of_scores = weights * (flow @ repeated(v[columns], q).mT - delta[:, rows]) * scale
        grads[0][rows] = (of_scores @ repeated(k[columns], q)).transpose(0, 1).to(q.dtype)
        of_keys = of_scores.mT @ q[rows].transpose(0, 1).to(weights.dtype)
        for total, part in ((grads[1], of_keys), (grads[2], weights.mT @ flow)):
            summed = part.unflatten(0, (k.shape[1], -1)).sum(1)
            total[columns] = summed.transpose(0, 1).to(total.dtype)
    return tuple(grads)


def check(q, k, v, starts_q, starts_k, max_q, max_k, dropout) -> None:
    """Insist on what the kernels of a GPU insist on."""
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype
    assert dropout == 0
    assert {one.stride(-1) for one in (q, k, v)} == {1}
    assert max_q > 1  # for 1 the kernel takes another way
    for starts, longest, tokens in ((starts_q, max_q, q), (starts_k, max_k, k)):
        assert starts.dtype == torch.int32
        assert starts[0] == 0
        assert starts[-1] == len(tokens)
        assert starts.diff().min() > 0
        assert starts.diff().max() <= longest
    assert len(starts_q) == len(starts_k)


def sequences(starts_q: Tensor, starts_k: Tensor):
    """Yield the ranges of queries and keys of each sequence."""
    for a, b, c, d in zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True):
        yield slice(int(a), int(b)), slice(int(c), int(d))


def repeated(keys: Tensor, queries: Tensor) -> Tensor:
    """Return [heads, n, D] of [n, kv_heads, D] in at least float32."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    times = queries.shape[1] // keys.shape[1]
    return keys.transpose(0, 1).repeat_interleave(times, 0).to(dtype)


def scores_of(q, k, is_causal, *, scale=None, window_size_left=-1, window_size_right=-1) -> Tensor:
    """Return [heads, n, m] scores; the last query is level with the last key."""
    keys = repeated(k, q)
    scores = q.transpose(0, 1).to(keys.dtype) @ keys.mT * (scale or q.shape[-1] ** -0.5)
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    right = 0 if is_causal else window_size_right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden |= distance < -right
    if window_size_left >= 0:
        hidden |= distance > window_size_left
    return scores.masked_fill(hidden, -torch.inf)
