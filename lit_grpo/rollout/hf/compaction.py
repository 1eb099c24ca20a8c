"""Remove rows from buffers in place: the last rows move into the places of removed ones.

Most rows stay where they are, so little is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Compaction:
    """The moves that remove some of N rows.

    Args:
        stays: [N] True on the rows that stay; on the CPU, so that the host waits for nothing.
        device: Device of the buffers.
    """

    def __init__(self, stays: Tensor, device: torch.device) -> None:
        index = torch.arange(len(stays))
        self.num_rows = int(stays.sum())
        targets = index[: self.num_rows][~stays[: self.num_rows]]
        sources = index[self.num_rows :][stays[self.num_rows :]]
        self.rows = index[: self.num_rows].index_copy(0, targets, sources)
        """[rows that stay] their old indices, on the CPU."""
        self._targets, self._sources = (
            one.to(device, non_blocking=True) for one in (targets, sources)
        )

    def apply(self, buffer: Tensor) -> None:
        """Move the rows of a buffer [at least N, *]; of the others the first ones stay."""
        buffer.index_copy_(0, self._targets, buffer.index_select(0, self._sources))
