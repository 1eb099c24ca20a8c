"""Derive seeds from the position of a run instead of storing them in checkpoints.

Every event has its own seed, derived from (seed, rank, purpose, number), so that a resumed run
draws the same random numbers as an uninterrupted one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch


class SeedPurpose(IntEnum):
    """Use of a seed; different uses never share random numbers."""

    ROLLOUT = 0
    EVALUATION = 1
    REFILL = 2
    COVARIANCE = 3


@dataclass(frozen=True, slots=True)
class Seeds:
    """The seeds of one rank of a run."""

    seed: int
    rank: int

    def derive(self, purpose: SeedPurpose, *number: int) -> int:
        """Return the seed of one numbered event."""
        sequence = np.random.SeedSequence([self.seed, self.rank, purpose, *number])
        return int(sequence.generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed every global source of random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
