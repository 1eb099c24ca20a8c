"""Pad ragged sequences to tensors, and number the tokens of each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(
    sequences: Sequence[Sequence[float]], value: float, dtype: torch.dtype, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the R sequences as a tensor [R, longest], and its mask, True on real tokens."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    longest = max(1, int(lengths.max()))
    mask = torch.arange(longest) < lengths[:, None]
    if left:
        mask = mask.flip(1)
    padded = torch.full(mask.shape, value, dtype=dtype)
    padded[mask] = torch.tensor([one for sequence in sequences for one in sequence], dtype=dtype)
    return padded, mask


def positions(mask: Tensor) -> Tensor:
    """Return [N, L], the position of every token among the real tokens of its row."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)
