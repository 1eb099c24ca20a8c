"""Ragged sequences as padded tensors, and the positions of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad(
    sequences: Sequence[Sequence[float]], value: float, dtype: torch.dtype, *, left: bool = False
) -> tuple[Tensor, Tensor]:
    """Pad sequences to a tensor [R, longest], and return it with its mask, True on real tokens."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    longest = max(1, int(lengths.max()))
    mask = torch.arange(longest) < lengths[:, None]
    if left:
        mask = mask.flip(1)
    padded = torch.full(mask.shape, value, dtype=dtype)
    padded[mask] = torch.tensor([one for sequence in sequences for one in sequence], dtype=dtype)
    return padded, mask


def positions(mask: Tensor) -> Tensor:
    """[N, L] position of every token among its row's real tokens."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)
