"""Estimated against measured ratios of CPU times: of two training runs, and of a step's two stages.

Steps of about a second are taken in turns and compared in pairs, so that both are as slow as the
machine is at that moment. Nothing here depends on how fast it is.
"""

from __future__ import annotations

import pytest
import torch
from measured_steps import STAGES, Running, predict_seconds, take_turns

SMALL = {"group": 4, "prompt": 128, "completion": 16, "kl": 0.1}
LARGER = {
    "longer completions": SMALL | {"completion": 40},
    "more layers": SMALL | {"shape": {"num_hidden_layers": 8}},
}
ROUNDS, TRIES = 6, 3


def differences(small: Running, larger: dict[str, Running]) -> dict[str, float]:
    """Return by how much each estimated ratio differs from the measured one, relative to it."""
    expected, *others = predict_seconds([small.case, *(one.case for one in larger.values())], 1)
    found = {
        f"{name}, {stage}": other[stage] / expected[stage] / running.ratio(stage, small, stage) - 1
        for (name, running), other in zip(larger.items(), others, strict=True)
        for stage in STAGES
    }
    estimated = expected["logprobs"] / expected["update"]
    return found | {"reference": estimated / small.ratio("logprobs", small, "update") - 1}


@pytest.mark.slow
def test_ratios_of_seconds_are_within_15_percent():
    assert torch.get_num_threads() == 1  # so that the time on a core counts
    small, larger = Running(SMALL), {name: Running(case) for name, case in LARGER.items()}
    running = [small, *larger.values()]
    take_turns(running, 1)  # what a process does once
    found = []
    for _ in range(TRIES):  # each adds further steps
        take_turns(running, ROUNDS)
        found.append(differences(small, larger))
        if max(map(abs, found[-1].values())) <= 0.15:
            return
    raise AssertionError(f"relative differences of estimated from measured ratios: {found}")
