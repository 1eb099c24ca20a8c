"""Estimated memory against the peaks of real steps, each in a process of its own."""

from __future__ import annotations

import pytest
from measured_steps import measure_memory

from lit_grpo.cli.plan.estimate import SAMPLING

WIDE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6}
LARGE_VOCABULARY = {"vocab_size": 16384}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {"shape": WIDE},
        {"shape": WIDE, "checkpointing": True, "prompt": 128, "completion": 128},
        {"shape": WIDE, "kl": 0.1, "budget": 1024},
        {"shape": LARGE_VOCABULARY, "completion": 128},
        {"shape": WIDE, "rank": 8, "prompt": 256},
    ],
    ids=["full", "checkpointing", "kl, small micro-batches", "large vocabulary", "adapter"],
)
def test_peaks_of_memory_are_within_15_percent(case):
    found = measure_memory(case)
    parts, during, measured = found["parts"], found["during"], found["measured"]
    states = ("weights", "gradients", "optimizer", "reference")
    # Weights and reference are there after loading, the others after the first step.
    loaded = parts["weights"] + parts.get("reference", 0)
    assert measured["after load"] == pytest.approx(loaded, rel=0.15, abs=8e6)
    always = sum(parts.get(name, 0) for name in states)
    assert measured["before sampling"] == pytest.approx(always, rel=0.15, abs=16e6)
    assert measured["sampling"] == pytest.approx(during[SAMPLING], rel=0.15, abs=16e6)
    update = max(size for moment, size in during.items() if moment != SAMPLING)
    assert measured["update"] == pytest.approx(update, rel=0.15)
