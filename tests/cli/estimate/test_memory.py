"""The memory of a rank by strategy and precision: 1,000 parameters, bytes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from setups import SIZES, UNIT, adapted, make
from tiny import LLAMA
from torch.optim import AdamW

from lit_grpo.cli.estimate.devices import DEVICES, Cluster
from lit_grpo.cli.estimate.memory import (
    ELSEWHERE,
    ENDING,
    FORWARD,
    SAMPLING,
    MemoryEstimate,
    MemoryPart,
    estimate_memory,
    gib,
)
from lit_grpo.cli.estimate.model_sizes import OptimizerSizes
from lit_grpo.cli.estimate.setup import Sampler, make_setup
from lit_grpo.cli.estimate.sharding import SHARDINGS
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.policy import Policy
from lit_grpo.policy.files.model_files import SHARD_BYTES
from lit_grpo.training import UpdateConfig

BF16 = replace(SIZES, parameter_bytes=2, trained_bytes=2)
MIXED = {"precision": "bf16-mixed"}
COPIED = "optimizer's copy of the weights"
OFFLOADED = {"offloads_weights": True, "offloads_optimizer": True}


def parts(setup) -> dict[str, int]:
    return {one.name: one.bytes for one in estimate_memory(setup).parts}


@pytest.mark.parametrize(
    ("strategy", "ranks", "settings", "expected"),
    [
        # weights, gradients, the optimizer's copy of weights, its state, reference
        ("single", 1, {}, (4000, 4000, 0, 8000, 4000)),
        ("ddp", 4, MIXED, (4000, 4000, 0, 8000, 4000)),
        ("fsdp2", 4, {}, (1000, 1000, 0, 2000, 1000)),
        ("fsdp2", 4, MIXED, (1000, 1000, 0, 2000, 1000)),
        ("fsdp2", 4, {"model": BF16}, (500, 500, 0, 2000, 1000)),
        ("deepspeed_stage_1", 4, {}, (4000, 1000, 1000, 2000, 4000)),
        ("deepspeed_stage_1", 4, MIXED, (4000, 1000, 1000, 2000, 4000)),
        ("deepspeed_stage_2", 4, {}, (4000, 1000, 1000, 2000, 4000)),
        ("deepspeed_stage_2", 4, MIXED, (4000, 1000, 1000, 2000, 4000)),
        ("deepspeed_stage_3", 4, {}, (1000, 1000, 1000, 2000, 1000)),
        ("deepspeed_stage_3", 4, MIXED, (1000, 1000, 1000, 2000, 1000)),
    ],
)
def test_each_strategy_divides_its_states(strategy, ranks, settings, expected):
    found = parts(make(strategy, ranks, reference_bytes=4000, **settings))
    names = ("weights", "gradients", COPIED, "optimizer", "reference")
    assert tuple(found.get(name, 0) for name in names) == expected


def test_what_is_offloaded_is_in_host_memory():
    sharding = replace(SHARDINGS["fsdp2"], **OFFLOADED)
    found = estimate_memory(make("fsdp2", 4, sharding=sharding, reference_bytes=4000))
    elsewhere = {one.name: one.bytes for one in found.parts if one.when == ELSEWHERE}
    sizes = {"weights": 1000, "gradients": 1000, "optimizer": 2000, "reference": 1000}
    assert elsewhere == sizes
    on_gpu = estimate_memory(make("fsdp2", 4, reference_bytes=4000))
    assert on_gpu.during(SAMPLING) - found.during(SAMPLING) == sum(sizes.values())
    on_cpu = estimate_memory(make("fsdp2", 4, sharding=sharding, device=UNIT))
    assert ELSEWHERE not in [one.when for one in on_cpu.parts]


def test_buckets_of_deepspeed_are_made_in_full_on_a_gpu():
    def buckets(stage: int, **settings) -> tuple[int, int]:
        found = parts(make(f"deepspeed_stage_{stage}", 2, **settings))
        return found["buckets of DeepSpeed"], found["copy of a bucket"]

    full = 4 * 500_000_000
    assert buckets(1) == buckets(2) == (2 * full, 4000)  # a copy of all that this model has
    assert buckets(3) == (full, 4000)
    large = replace(SIZES, trained_parameters=10**9)
    assert buckets(2, model=large) == (2 * full, full)
    assert buckets(2, device=UNIT) == (4000, 4000)


def test_a_merge_on_a_cpu_holds_a_file_of_the_model():
    merging = parts(make(merges=True, device=UNIT))
    # The largest of its tensors has 200 values, of which a merge holds two copies.
    assert (merging["a file of the model"], merging["largest tensor"]) == (4000, 1600)
    large = replace(SIZES, parameters=10**10)
    assert parts(make(merges=True, device=UNIT, model=large))["a file of the model"] == SHARD_BYTES
    fused = replace(large, largest_tensor=SHARD_BYTES)  # of 4 bytes each
    found = parts(make(merges=True, device=UNIT, model=fused))
    assert found["a file of the model"] == 4 * SHARD_BYTES
    assert "a file of the model" not in parts(make(device=UNIT)) | parts(make(merges=True))


def test_only_ddp_has_buckets_beside_its_gradients():
    assert parts(make("ddp", 2))["buckets of ddp"] == 4000
    assert "buckets of ddp" not in parts(make("fsdp2", 2)) | parts(make())


def test_bfloat16_weights_have_gradients_and_state_in_bfloat16():
    def found(**settings):
        outline = Policy(architecture=LLAMA, dtype="bfloat16").outline()
        step, cluster = make().step, Cluster(device=DEVICES["H100"])
        setup = make_setup(outline, AdamW, step, cluster, precision="bf16-mixed", **settings)
        return setup.model.parameters, parts(setup)

    number, plain = found()
    assert plain["weights"] - 2 * number in range(200)  # buffers
    assert plain["gradients"] == 2 * number
    assert plain["optimizer"] - 4 * number in range(200)  # a step count for each tensor
    assert found(optimizer_bytes=2)[1]["optimizer"] == 2 * number
    assert found(optimizer_bytes=6)[1]["optimizer"] == 6 * number


def test_the_gradients_of_one_micro_batch_are_freed_before_its_forward_pass():
    one = estimate_memory(make())
    assert one.during(ENDING) - one.during(FORWARD) == 4000 + _backward(one) - _forward_only(one)
    two = estimate_memory(make(update=UpdateConfig(max_tokens_per_micro_batch=26)))
    assert [part.when for part in two.parts if part.name == "gradients"] == [("always",)]


def _backward(estimate: MemoryEstimate) -> int:
    return sum(one.bytes for one in estimate.parts if one.name == "a layer's backward pass")


def _forward_only(estimate: MemoryEstimate) -> int:
    return sum(
        one.bytes
        for one in estimate.parts
        if one.is_there(FORWARD) and not one.is_there(ENDING) and one.name != "gradients"
    )


def test_an_adapter_trains_its_own_parameters_and_needs_no_reference():
    setup = make(model=adapted(), optimizer=OptimizerSizes(state_bytes=800, copies=False))
    found = parts(setup)
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4000, 400, 800)
    assert all("model.policy.lora" not in one.advice for one in estimate_memory(setup).parts)


def test_vllm_takes_its_share_while_it_is_awake():
    for sleeps in (True, False):
        sampler = Sampler(kind="vllm", memory_fraction=0.5, sleeps=sleeps)
        (part,) = (
            one for one in estimate_memory(make(sampler=sampler)).parts if one.name == "vLLM"
        )
        assert part.bytes == DEVICES["H100"].memory // 2
        assert part.when == ((SAMPLING,) if sleeps else ("always",))


def test_the_advice_is_to_divide_what_several_ranks_have_whole():
    whole = estimate_memory(make("ddp", 4))
    (advice,) = (one.advice for one in whole.parts if one.name == "optimizer")
    assert "fsdp2" in advice
    (advice,) = (one.advice for one in estimate_memory(make()).parts if one.name == "optimizer")
    assert "model.policy.lora" in advice


def test_reading_long_prompts_is_named_where_it_needs_more_than_logits():
    long = step_sizes([10_000] * 8, 10, num_ranks=1, group_size=2, update=UpdateConfig())
    names = {one.name for one in estimate_memory(make(step=long)).parts if one.when == (SAMPLING,)}
    assert "reading prompts" in names
    assert "logits" not in names


def test_the_peak_is_that_of_the_worst_moment_and_so_is_the_advice():
    found = MemoryEstimate(
        (
            MemoryPart(name="weights", bytes=5, advice="a"),
            MemoryPart(name="activations", bytes=3, when=("update",), advice="b"),
            MemoryPart(name="keys and values", bytes=4, when=(SAMPLING,), advice="c"),
            MemoryPart(name="CUDA", bytes=6),
        )
    )
    assert found.peak == 15
    assert found.moments == [SAMPLING, "update"]
    assert found.advice() == ["a", "c"]
    assert (found.at_peak[0].name, found.binding.name) == ("CUDA", "weights")
    assert MemoryEstimate(found.parts[:1]).moments == ["always"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [(2**30, "1 GiB"), (2000 * 2**30, "2,000 GiB"), (1020 * 2**20, "0.996 GiB"), (1536, "1.5 KiB")],
)
def test_sizes_have_three_digits(size, shown):
    assert gib(size) == shown
