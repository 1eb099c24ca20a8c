import random
from itertools import product

import numpy as np
import torch

from lit_grpo.training.seeds import SeedPurpose, Seeds, seed_everything


def test_every_seed_rank_purpose_and_event_has_random_numbers_of_its_own():
    events = [(0,), (1,), (0, 1), (1, 1), (1, 2)]
    derived = [
        Seeds(seed, rank).derive(purpose, *event)
        for seed, rank, purpose, event in product((0, 1), (0, 1), SeedPurpose, events)
    ]
    assert len(set(derived)) == len(derived)


def test_a_derived_seed_is_the_same_in_every_process_and_version():
    assert Seeds(7, 1).derive(SeedPurpose.REFILL, 3, 2) == 3477428907


def test_all_global_generators_are_seeded():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    for seed in (5, 2**32 + 5):
        seed_everything(seed)
        first, second = draw(), draw()
        assert all(one != two for one, two in zip(first, second, strict=True))
        seed_everything(seed)
        assert draw() == first
