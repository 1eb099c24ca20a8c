"""Random numbers that are counted, not carried.

Each event draws from a seed of its own, made of (seed, rank, purpose, number), so that a resumed
run draws what an uninterrupted one would, with no random state in the checkpoint.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch


class SeedPurpose(IntEnum):
    """Keep the random numbers of different kinds of events apart."""

    ROLLOUT = 0
    EVALUATION = 1
    REFILL = 2


def derive_seed(seed: int, rank: int, purpose: SeedPurpose, *number: int) -> int:
    """Return the seed of one numbered event of a run on one rank."""
    sequence = np.random.SeedSequence([seed, rank, purpose, *number])
    return int(sequence.generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed every global source of random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
