"""The settings of DeepSpeed; `tests/end_to_end/test_sharded.py` trains under it."""

import sys
from importlib import import_module

import pytest
import torch
from forked import run_in_processes
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from needs import needs_deepspeed

from lit_grpo.distributed import deepspeed
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.types import UserError


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(deepspeed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'lit-grpo\[deepspeed\]'"):
        ZeROStrategy()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 0}, "stage must be 1, 2 or 3, got 0"),
        ({"stage": 2, "offload_parameters": True}, "only stage 3 partitions weights"),
        ({"timeout_minutes": 0}, "timeout_minutes"),
        ({"config": {"gradient_clipping": 1.0}}, "config must be a dict without gradient_clipping"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ZeROStrategy(**settings)


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "stage", "offloaded"),
    [
        ("deepspeed_stage_1", 1, set()),
        ("deepspeed_stage_2", 2, set()),
        ("deepspeed_stage_3", 3, set()),
        ("deepspeed_stage_2_offload", 2, {"offload_optimizer"}),
        ("deepspeed_stage_3_offload", 3, {"offload_optimizer", "offload_param"}),
    ],
)
def test_lightnings_names_of_strategies_make_this_one(name, stage, offloaded):
    strategy = StrategyRegistry.get(name)
    assert type(strategy) is ZeROStrategy
    assert strategy.stage == strategy.config["zero_optimization"]["stage"] == stage
    found = {one for one in strategy.config["zero_optimization"] if one.startswith("offload")}
    assert found == offloaded


@needs_deepspeed
def test_further_settings_are_merged_with_those_of_the_stage():
    given = {"zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": True}
    config = ZeROStrategy(3, config=given).config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["zero_optimization"]["contiguous_gradients"] is True
    assert config["wall_clock_breakdown"] is True


def test_a_program_that_makes_its_trainer_first_finds_the_names_as_well():
    def find() -> str:
        for name in [one for one in sys.modules if one.startswith("lit_grpo")]:
            del sys.modules[name]
        StrategyRegistry.pop("fsdp2", None)
        StrategyRegistry.register("deepspeed_stage_2", DeepSpeedStrategy, override=True)
        import_module("lit_grpo").Trainer  # noqa: B018 - loads it
        return StrategyRegistry["deepspeed_stage_2"]["strategy"].__module__

    assert run_in_processes(find) == ["lit_grpo.distributed.deepspeed"]


@needs_deepspeed
def test_a_start_neither_compiles_nor_waits_for_one_that_was_killed_while_it_compiled(
    tmp_path, monkeypatch
):
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def connect() -> bool:
        strategy = ZeROStrategy()
        strategy.accelerator = CPUAccelerator()
        strategy.cluster_environment = LightningEnvironment()
        strategy.parallel_devices = [torch.device("cpu")]
        strategy.setup_distributed()
        return torch.distributed.is_initialized()

    assert run_in_processes(connect) == [True]
    assert [*tmp_path.rglob("*")] == [lock.parent, lock]
