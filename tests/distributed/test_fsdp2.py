"""Where shards are; `tests/end_to_end/test_sharded.py` trains with them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from forked import run_in_processes
from lightning.pytorch.plugins import MixedPrecision, Precision
from small_runs import make_module
from tiny import LLAMA
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.policy import Policy


def strategy_on(device: torch.device, **settings) -> FSDP2Strategy:
    strategy = FSDP2Strategy(**settings)
    strategy.parallel_devices = [device]
    return strategy


@pytest.mark.parametrize(
    ("device", "cpu_offload", "backend"),
    [("cpu", True, "gloo"), ("cuda", False, "nccl"), ("cuda", True, "cpu:gloo,cuda:nccl")],
)
def test_ranks_that_offload_shards_from_a_gpu_can_sum_on_both_devices(device, cpu_offload, backend):
    strategy = strategy_on(torch.device(device, 0), cpu_offload=cpu_offload)
    assert strategy._get_process_group_backend() == backend


def offload_from_another_device(store) -> dict[str, object]:
    """Set up a module as for a run on the pretend device with its shards in host memory."""
    from pretend_device import DEVICE, pretend_device

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    strategy, module = strategy_on(torch.device("cpu"), cpu_offload=True), make_module()
    strategy._device_mesh = torch.distributed.init_device_mesh("cpu", (1,))
    module.policy.load(with_reference=False, sharding=strategy.sharding)
    module.register_buffer("of_the_user", torch.ones(2))
    strategy = strategy_on(DEVICE, cpu_offload=True)
    strategy.model = module
    with pretend_device():
        strategy.model_to_device()
    torch.distributed.destroy_process_group()
    return {
        "module": str(module.device),
        "buffers": {name: str(one.device) for name, one in module.named_buffers()},
        "shards": {str(one.device) for one in module.parameters()},
        "are_all_shards": all(isinstance(one, DTensor) for one in module.parameters()),
    }


def test_offloaded_shards_stay_in_host_memory_and_everything_else_moves(tmp_path):
    (found,) = run_in_processes(partial(offload_from_another_device, tmp_path / "store"))
    assert found["module"] == "pretend:0"
    assert len(found["buffers"]) > 1
    assert {*found["buffers"].values()} == {"pretend:0"}
    assert found["shards"] == {"cpu"}
    assert found["are_all_shards"]


@pytest.mark.parametrize(("device", "is_pinned"), [("cpu", False), ("cuda", True)])
def test_host_memory_is_pinned_if_a_gpu_reads_it(device, is_pinned):
    strategy = strategy_on(torch.device(device, 0), cpu_offload=True)
    strategy._device_mesh = object()
    offload = strategy.sharding.offload
    assert isinstance(offload, CPUOffloadPolicy)
    assert offload.pin_memory is is_pinned


def gather(store) -> list[tuple[int, int]]:
    """Return, for each precision, the bytes that are gathered, and those that were announced."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    found = []
    for precision in (Precision(), MixedPrecision("bf16-mixed", "cpu")):
        strategy, policy = strategy_on(torch.device("cpu")), Policy(architecture=LLAMA)
        strategy.precision_plugin = precision
        strategy._device_mesh = torch.distributed.init_device_mesh("cpu", (1,))
        policy.load(with_reference=False, sharding=strategy.sharding)
        announced = strategy.sharding.gathered_bytes(policy.model)
        with strategy.sharding.gathered(policy.model):
            found.append((sum(one.nbytes for one in policy.model.parameters()), announced))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("precision", "computes_in", "sums_in"),
    [
        (Precision(), None, None),
        (MixedPrecision("bf16-mixed", "cpu"), torch.bfloat16, torch.float32),
    ],
)
def test_gradients_are_summed_in_float32_whatever_the_weights_are_gathered_in(
    precision, computes_in, sums_in
):
    strategy = strategy_on(torch.device("cpu"))
    strategy.precision_plugin = precision
    strategy._device_mesh = object()
    policy = strategy.sharding.mixed_precision
    assert (policy.param_dtype, policy.reduce_dtype) == (computes_in, sums_in)


def test_the_whole_policy_has_as_many_bytes_as_announced(tmp_path):
    ((whole, half),) = run_in_processes(partial(gather, tmp_path / "store"))
    assert whole[0] == whole[1] == 2 * half[0]
    assert half[0] == half[1] > 0
