"""Estimated memory against the peaks of real steps, in processes of their own."""

from __future__ import annotations

import pytest
from measured_steps import measure_memory
from needs import needs_deepspeed

from lit_grpo.cli.estimate.memory import SAMPLING

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4}
LARGE_VOCABULARY = {"vocab_size": 16384}
CASES = {
    "full": {"shape": WIDE},
    "checkpointing": {
        "shape": WIDE,
        "checkpointing": True,
        "prompt": 128,
        "completion": 128,
        "group": 4,
    },
    "kl, small micro-batches": {"shape": WIDE, "kl": 0.1, "budget": 1024},
    "large vocabulary": {"shape": LARGE_VOCABULARY, "completion": 128},
    "adapter": {"shape": WIDE, "rank": 8, "prompt": 256},
}


@pytest.fixture(scope="module")
def of_a_process() -> dict[str, dict]:
    """What a process was measured to need in each case, beside the plan."""
    found = measure_memory(*({"steps": 2, **case} for case in CASES.values()))
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_peaks_of_memory_are_within_15_percent(name, of_a_process):
    found = of_a_process[name]
    parts, during, measured = found["parts"], found["during"], found["measured"]
    # Weights and reference are there after loading, the others after the first step.
    loaded = parts["weights"] + parts.get("reference", 0)
    assert measured["after load"] == pytest.approx(loaded, rel=0.15, abs=8e6)
    assert measured["before sampling"] == pytest.approx(found["kept"], rel=0.15, abs=16e6)
    assert measured["sampling"] == pytest.approx(during[SAMPLING], rel=0.15, abs=16e6)
    update = max(size for moment, size in during.items() if moment != SAMPLING)
    assert measured["update"] == pytest.approx(update, rel=0.15)


FEW = {"prompt": 16, "completion": 8, "group": 4, "shape": WIDE | {"num_hidden_layers": 3}}
"""So few tokens that a rank needs memory for its states, and little else."""
SHARDED = {
    "ddp": {"strategy": "ddp", "steps": 3},  # whose buckets are made anew after the first step
    "fsdp2": {"strategy": "fsdp2"},
    "stage 1": {"strategy": "deepspeed_stage_1"},
    "stage 2": {"strategy": "deepspeed_stage_2"},
    "stage 2, small micro-batches": {"strategy": "deepspeed_stage_2", "budget": 40},
    "stage 3": {"strategy": "deepspeed_stage_3"},
}


@pytest.fixture(scope="module")
def of_a_rank() -> dict[str, dict]:
    """What a rank was measured to need under each strategy, beside the plan."""
    found = measure_memory(*({"ranks": 2, "steps": 2, **FEW, **one} for one in SHARDED.values()))
    return dict(zip(SHARDED, found, strict=True))


@needs_deepspeed
@pytest.mark.parametrize("name", SHARDED)
def test_peaks_of_a_rank_are_within_15_percent(name, of_a_rank):
    found, measured = of_a_rank[name], of_a_rank[name]["measured"]
    assert measured["before sampling"] == pytest.approx(found["kept"], rel=0.15)
    during = found["during"]
    assert measured["sampling"] == pytest.approx(during.pop(SAMPLING), rel=0.15, abs=8e6)
    assert measured["update"] == pytest.approx(max(during.values()), rel=0.15)
