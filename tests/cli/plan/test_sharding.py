"""The strategies that are known, by name and by object."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_grpo.cli.plan.sharding import sharding_of
from lit_grpo.types import UserError


@pytest.mark.parametrize(
    ("strategy", "ranks", "name"),
    [
        ("auto", 1, "single"),
        ("auto", 2, "ddp"),
        ("ddp_find_unused_parameters_true", 2, "ddp"),
        ("fsdp2", 8, "fsdp2"),
        ("deepspeed_stage_3", 8, "deepspeed_stage_3"),
        ("deepspeed", 8, "deepspeed_stage_2"),
        (DDPStrategy(), 2, "ddp"),
        (ModelParallelStrategy(), 2, "fsdp2"),
        (SingleDeviceStrategy(), 1, "single"),
    ],
)
def test_a_strategy_is_known_by_its_name_or_its_class(strategy, ranks, name):
    assert sharding_of(strategy, ranks).name == name


def test_another_strategy_is_refused():
    with pytest.raises(UserError, match="strategy must be one of auto, single, ddp, fsdp2"):
        sharding_of("xla", 2)
