"""What is known of a strategy, by its name and by an object with options."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_grpo.cli.estimate.sharding import sharding_of
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.types import UserError

with_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs pip install 'lit-grpo[deepspeed]'"
)


@pytest.mark.parametrize(
    ("strategy", "ranks", "name"),
    [
        ("auto", 1, "single"),
        ("auto", 2, "ddp"),
        ("ddp_find_unused_parameters_true", 2, "ddp"),
        ("fsdp2", 8, "fsdp2"),
        ("deepspeed_stage_3", 8, "deepspeed_stage_3"),
        ("deepspeed_stage_2_offload", 8, "deepspeed_stage_2"),
        (DDPStrategy(), 2, "ddp"),
        (FSDP2Strategy(), 2, "fsdp2"),
        (SingleDeviceStrategy(), 1, "single"),
    ],
)
def test_a_strategy_is_known_by_its_name_or_its_class(strategy, ranks, name):
    assert sharding_of(strategy, ranks).name == name


@pytest.mark.parametrize("strategy", ["xla", "single", "deepspeed", ModelParallelStrategy()])
def test_a_strategy_that_cannot_be_trained_with_is_refused(strategy):
    with pytest.raises(UserError, match="strategy must be auto, ddp, fsdp2 or deepspeed_stage_1"):
        sharding_of(strategy, 2)


def test_options_of_fsdp2_change_what_is_divided_and_where_it_is():
    plain = sharding_of(FSDP2Strategy(), 2)
    assert plain == sharding_of("fsdp2", 2)
    assert not sharding_of(FSDP2Strategy(whole_gradients=True), 2).gradients
    assert sharding_of(FSDP2Strategy(reshard_after_forward=False), 2).keeps_layers
    offloaded = sharding_of(FSDP2Strategy(cpu_offload=True), 2)
    assert offloaded.offloads_weights
    assert offloaded.offloads_optimizer


def test_ddp_has_no_buckets_if_its_gradients_are_views_of_them():
    assert sharding_of(DDPStrategy(), 2).copies_gradients
    assert not sharding_of(DDPStrategy(gradient_as_bucket_view=True), 2).copies_gradients


@with_deepspeed
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepspeed_stage_1", {"stage": 1}),
        ("deepspeed_stage_2_offload", {"stage": 2, "offload_optimizer": True}),
        (
            "deepspeed_stage_3_offload",
            {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        ),
    ],
)
def test_a_stage_of_deepspeed_is_the_same_by_its_name_and_as_an_object(name, settings):
    assert sharding_of(ZeROStrategy(**settings), 2) == sharding_of(name, 2)


@with_deepspeed
def test_sizes_of_buckets_and_parts_are_those_of_deepspeeds_settings():
    config = {"zero_optimization": {"reduce_bucket_size": 1e6, "sub_group_size": 1e7}}
    found = sharding_of(ZeROStrategy(3, config=config), 2)
    assert (found.bucket_values, found.step_values) == (10**6, 10**7)
    assert sharding_of(ZeROStrategy(2, config=config), 2).step_values is None


@with_deepspeed
def test_the_defaults_are_those_of_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    found, defaults = sharding_of("deepspeed_stage_3", 2), DeepSpeedZeroConfig()
    assert found.bucket_values == defaults.reduce_bucket_size
    assert found.step_values == defaults.sub_group_size
