"""What DeepSpeed is asked for; `tests/end_to_end/test_sharded.py` trains with a real engine."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_policy
from torch import nn

from lit_grpo.distributed.deepspeed_engine import (
    EnginePrecision,
    ZeROSharding,
    ZeROSteps,
    refuse_layered_head,
)
from lit_grpo.policy import LoRA
from lit_grpo.types import UserError


class Engine:
    """The part of the engine that is used."""

    def __init__(self, norm: float = 0.5):
        self.optimizer = SimpleNamespace(clip_grad=None)
        self.norm = norm
        self.called: list[str] = []

    def __call__(self, function):
        self.called.append("forward")
        return function()

    def step(self):
        self.called.append(f"step clipped to {self.optimizer.clip_grad}")

    def get_global_grad_norm(self):
        return self.norm


def strategy_of(engine: Engine | None = None, stage: int = 3, precision: str = "32-true"):
    strategy = SimpleNamespace(
        stage=stage, engine=engine, root_device=torch.device("cpu"), is_training=False
    )
    strategy.precision_plugin = EnginePrecision(precision, strategy)
    return strategy


def layered(**settings) -> nn.Module:
    return tiny_policy(lora=LoRA(rank=2, **settings)).model


@pytest.mark.parametrize(
    "settings",
    [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}],
    ids=["adapter", "copy"],
)
def test_a_head_of_several_layers_is_refused_in_stage_3(settings):
    model = layered(**settings)
    with pytest.raises(UserError, match="must leave the output layer as it is in stage 3"):
        ZeROSharding(strategy=strategy_of()).shard(model)
    ZeROSharding(strategy=strategy_of(stage=2)).shard(model)
    refuse_layered_head(layered(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("stage", "is_training", "expected"), [(3, True, True), (3, False, False), (2, True, False)]
)
def test_only_a_training_in_stage_3_partitions_a_model_as_it_is_loaded(
    stage, is_training, expected
):
    strategy = strategy_of(stage=stage)
    strategy.is_training, strategy.config = is_training, {"zero_optimization": {}}
    assert ZeROSharding(strategy=strategy).loads_parts == expected


def test_what_uses_the_weights_runs_within_a_call_of_the_engine():
    engine = Engine()
    assert ZeROSharding(strategy=strategy_of(engine)).run(None, lambda: 3) == 3
    assert engine.called == ["forward"]
    assert ZeROSharding(strategy=strategy_of(None)).run(nn.Linear(1, 1), lambda: 3) == 3


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)]
)
def test_autocast_is_that_of_the_precision_whatever_it_is_around(precision, dtype):
    sharding = ZeROSharding(strategy=strategy_of(Engine(), precision=precision))
    with torch.autocast("cpu", dtype=torch.float16):
        product = sharding.run(None, lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    assert product.dtype == dtype


@pytest.mark.parametrize(("stage", "num_calls"), [(2, 0), (3, 1)])
def test_a_function_in_place_of_a_part_runs_between_its_hooks_in_stage_3(stage, num_calls):
    part, calls = nn.Linear(2, 2), []
    part.register_forward_pre_hook(lambda *_: calls.append(1))
    sharding = ZeROSharding(strategy=strategy_of(Engine(), stage))
    states = torch.ones(1, 2)
    assert torch.equal(sharding.run_part(part, lambda given: given + 1, states), states + 1)
    assert len(calls) == num_calls
    assert torch.equal(part(states), nn.functional.linear(states, part.weight, part.bias))


def test_a_part_has_its_own_forward_again_after_an_error():
    part, states = nn.Linear(2, 2), torch.ones(1, 2)
    with pytest.raises(ZeroDivisionError):
        ZeROSharding(strategy=strategy_of(Engine())).run_part(part, lambda _: 1 / 0, states)
    assert part(states).shape == (1, 2)


@pytest.mark.parametrize(("norm", "num_counted"), [(0.5, 1), (float("inf"), 0)])
def test_the_engine_clips_and_steps_and_lightning_counts_the_steps_that_were_taken(
    norm, num_counted
):
    engine, counted = Engine(norm), []
    optimizer = SimpleNamespace(step=lambda: counted.append(1))
    found, is_finite = ZeROSteps(strategy=strategy_of(engine)).take(optimizer, [], 2.0)
    assert engine.called == ["step clipped to 2.0"]
    assert (found.item(), is_finite) == (norm, norm == 0.5)
    assert len(counted) == num_counted


def test_weights_and_inputs_keep_their_types():
    precision = strategy_of(precision="bf16-mixed").precision_plugin
    layer, inputs = nn.Linear(1, 1), torch.ones(1)
    assert precision.convert_module(layer).weight.dtype == torch.float32
    assert precision.convert_input(inputs) is inputs
    with precision.tensor_init_context():
        assert torch.ones(1).dtype == torch.float32


def test_only_stage_3_gathers_weights_to_sample_and_each_in_its_own_type():
    model = tiny_policy(lora=LoRA(rank=2), dtype="bfloat16").model
    found = [
        ZeROSharding(strategy=strategy_of(Engine(), stage)).gathered_bytes(model)
        for stage in (1, 2, 3)
    ]
    assert found == [0, 0, sum(one.nbytes for one in model.parameters())]
    assert ZeROSharding(strategy=strategy_of()).gathered_bytes(model) == 0  # nothing is trained
