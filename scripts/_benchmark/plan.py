"""Compare the seconds that ``lit-grpo plan`` estimates with those of real steps on this CPU.

A busy machine is slower, so the ratios of two configs are compared: medians over pairs of steps
that are taken in turns.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _benchmark.results import Result

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
PLAN_TARGET = 1.15
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "longer completions": ({}, {"completion": 160}, ("generation", "update")),
    "more layers": ({}, {"shape": {"num_hidden_layers": 8}}, ("generation", "update")),
    "checkpointing": ({"completion": 128}, {"completion": 128, "checkpointing": True}, ("update",)),
    "wider": ({}, {"shape": {"hidden_size": 512, "intermediate_size": 1376}}, ("update",)),
}
"""Name -> a config, another one, and the stages whose seconds are compared."""
REFERENCE = {"kl": 0.1, "prompt": 128}


def compare_plan(rounds: int) -> Iterator[Result]:
    """Compare the estimated with the measured ratio of two configs, or of two stages."""
    sys.path.append(str(SUPPORT))
    from measured_steps import measure_in_turns, predict_seconds

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for name, (one, other, stages) in PAIRS.items():
        few, many = measure_in_turns([one, other], rounds)
        small, large = predict_seconds([one, other])
        for stage in stages:
            measured = many.ratio(stage, few, stage)
            yield _result(f"{name}, {stage}", large[stage] / small[stage], measured)
    (running,) = measure_in_turns([REFERENCE], rounds)
    (found,) = predict_seconds([REFERENCE])
    measured = running.ratio("logprobs", running, "update")
    yield _result("reference against update", found["logprobs"] / found["update"], measured)


def _result(case: str, estimated: float, measured: float) -> Result:
    return Result(
        figure="plan",
        case=case,
        against="the smaller of the estimated and the measured ratio, with the larger as ours",
        ours=max(estimated, measured),
        other=min(estimated, measured),
        unit="",
        target=PLAN_TARGET,
        details={"ratio": {"estimated": round(estimated, 3), "measured": round(measured, 3)}},
    )
