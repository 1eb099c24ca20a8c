"""Estimated operations against those that torch counts in real steps.

`scripts/benchmark.py --only plan` compares estimated with measured seconds.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from measured_steps import CPU, STAGES, Running, setup_of
from torch.utils.flop_counter import FlopCounterMode

from lit_grpo.cli.estimate.work import decode_work, forward_work, prefill_work, update_work

FEW_TOKENS = {"group": 2, "completion": 16}
BLOCKED = torch.ops.mkldnn._linear_pointwise
"""The products of `BlockedWeights`, which torch does not count by itself."""
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


def blocked_flops(rows: Any, weights: Any, *_: Any, **others: Any) -> int:
    """Return the operations of a blocked product of such shapes."""
    return 2 * prod(rows) * int(weights[0])


def counted(case: dict[str, Any]) -> dict[str, float]:
    """Return the operations of products in each stage of a step."""
    running, found = Running(case), {}
    for name, method in STAGES.items():
        inner = getattr(running.module, method)

        def watched(*args: Any, name: str = name, inner: Any = inner, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False, custom_mapping={BLOCKED: blocked_flops}) as counter:
                result = inner(*args, **kwargs)
            counts = counter.get_flop_counts().get("Global", {})
            found[name] = sum(counts.get(operator, 0) for operator in (*PRODUCTS, BLOCKED))
            return result

        setattr(running.module, method, watched)
    running.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"completion": 64, "prompt": 128},
        {"checkpointing": True},
        {"shape": {"num_hidden_layers": 2, "hidden_size": 512}},
        {"group": 2, "budget": 256},
        {"kl": 0.1},
        {"rank": 4},
        {"completion": 16, "group": 2, "kl": 0.1, "shape": {"vocab_size": 60_000}},
    ],
    ids=lambda case: " ".join(map(str, case)) or "default",
)
def test_products_are_those_that_a_step_computes(case):
    case = FEW_TOKENS | case
    setup, found = setup_of(case, CPU), counted(case)
    assert found["update"] == pytest.approx(update_work(setup).flops, rel=0.03)
    reference = forward_work(setup).flops if setup.reference_passes else 0
    assert found["logprobs"] == pytest.approx(reference, rel=0.03)
    step = setup.step
    tokens = step.mean_completion_tokens
    decoded = decode_work(setup, step.num_rows, tokens, tokens, dtype=0)
    sampled = prefill_work(setup).flops + decoded.flops
    assert found["generation"] == pytest.approx(sampled, rel=0.03)
