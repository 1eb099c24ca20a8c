"""Seconds of a step, by hand for a device of which one rate counts at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from setups import ATTENTION, BODY, LOGITS, UNIT, adapted, make

from lit_grpo.cli.estimate import seconds
from lit_grpo.cli.estimate.devices import DEVICES, Cluster
from lit_grpo.cli.estimate.seconds import estimate_seconds, seconds_of, update_transfer_bytes
from lit_grpo.cli.estimate.setup import Sampler
from lit_grpo.cli.estimate.sharding import SHARDINGS
from lit_grpo.cli.estimate.work import Work
from lit_grpo.training import UpdateConfig

PRODUCTS = replace(UNIT, bandwidth=math.inf)


def test_kernels_run_one_after_another_and_a_gpu_waits_for_python():
    work = Work(flops=70.0, bytes=80.0, layers=1000)
    gpu = replace(DEVICES["H100"], flops=1.0, bandwidth=1.0, host_seconds_per_layer=0.1)
    assert seconds_of(work, gpu, compute_bytes=2) == (
        70 / 0.7 + 80 / 0.8,
        "matrix products",
    )
    slow = replace(gpu, host_seconds_per_layer=1.0)
    assert seconds_of(work, slow, compute_bytes=2) == (1000, "issuing kernels from Python")
    cpu = replace(UNIT, host_seconds_per_layer=0.1)
    assert seconds_of(work, cpu, compute_bytes=4) == (
        70 + 80 + 100,
        "the overhead of each operation",
    )


def test_more_gpus_are_no_advice_for_a_cpu():
    part = next(one for one in estimate_seconds(make(device=UNIT)).parts if one.name == "update")
    assert part.advice == "lower model.sampling.max_tokens or model.group_size"


@pytest.mark.parametrize(("ranks", "engine"), [(1, "engines/vllm"), (4, "engines/vllm_server")])
def test_the_advised_engine_samples_for_so_many_ranks(ranks, engine):
    found = estimate_seconds(make("fsdp2", ranks, device=DEVICES["H100"]))
    advice = next(one.advice for one in found.parts if one.name == "generation: tokens")
    assert f"(--config {engine})" in advice


def test_few_rows_have_their_own_rates():
    device = replace(PRODUCTS, attention_share=0.5, few_rows_share=0.25, few_rows_share_16=0.125)
    device = replace(device, few_rows_attention_share=0.1)
    many, few = Work(flops=1.0, attention=1.0), Work(flops=1.0, attention=1.0, few_rows=True)
    assert seconds_of(many, device, compute_bytes=4)[0] == pytest.approx(1 + 2)
    assert seconds_of(few, device, compute_bytes=4)[0] == pytest.approx(4 + 20)
    assert seconds_of(few, device, compute_bytes=2)[0] == pytest.approx(8 + 20)


def test_sampling_runs_the_model_on_every_token():
    found = estimate_seconds(make(device=PRODUCTS))
    attention = 4 * 8 * (6 + 9 / 2) * 2  # of each sampled token: both layers, the mean context
    assert found["generation: tokens"] == 4 * 9 * (2 * 500 + 2 * 800 + attention)
    assert found["generation: prompts"] == 2 * 500 * 12 + 2 * 8 * 12 * 6 * 2
    waves = estimate_seconds(make(device=replace(UNIT, flops_float32=math.inf)))
    two = make(device=replace(UNIT, flops_float32=math.inf), sampler=Sampler(max_concurrent=2))
    # Each wave reads all weights at every token but the first, which comes from the prompt.
    more = estimate_seconds(two)["generation: tokens"] - waves["generation: tokens"]
    assert more == 9 * 4000


def test_passes_before_the_update_cost_a_forward_pass_each():
    found = estimate_seconds(make(device=PRODUCTS, old_passes=1, reference_passes=1))
    assert found["logprobs"] == 2 * (BODY + LOGITS + ATTENTION)
    assert estimate_seconds(make(device=PRODUCTS))["logprobs"] == 0


def test_a_teacher_costs_by_its_parameters():
    found = estimate_seconds(make(device=PRODUCTS, teacher_parameters=3000))
    assert found["logprobs"] == 3 * (BODY + LOGITS + ATTENTION)


def test_every_epoch_is_an_update():
    one, two = (
        estimate_seconds(make(device=UNIT, update=UpdateConfig(epochs=epochs)))["update"]
        for epochs in (1, 2)
    )
    assert two == 2 * one


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("single", 0),
        ("ddp", 0.75 * 2 * 4000),  # an all-reduce
        ("fsdp2", 0.75 * (2 * 2 * 4000 + 2 * 4000)),  # of both micro-batches: two passes, gradients
        ("deepspeed_stage_1", 0.75 * (2 * 4000 + 4000)),  # and the weights come back
        ("deepspeed_stage_2", 0.75 * (2 * 2 * 4000 + 4000)),
        ("deepspeed_stage_3", 0.75 * (2 * 2 * 4000 + 2 * 4000)),
    ],
)
def test_each_strategy_moves_its_bytes(strategy, expected):
    ranks = 1 if strategy == "single" else 4
    setup = make(strategy, ranks, update=UpdateConfig(max_tokens_per_micro_batch=26))
    assert update_transfer_bytes(setup) == expected


def test_weights_are_gathered_as_they_are_divided_and_once_if_layers_stay():
    update = UpdateConfig(max_tokens_per_micro_batch=26)
    settings = {"precision": "bf16-mixed", "update": update}
    # DeepSpeed gathers float32, FSDP2 bfloat16; the gradients are float32 under both.
    third = make("deepspeed_stage_3", 4, **settings)
    assert update_transfer_bytes(third) == 0.75 * (2 * 2 * 4000 + 2 * 4000)
    assert update_transfer_bytes(make("fsdp2", 4, **settings)) == 0.75 * (2 * 2 * 2000 + 2 * 4000)
    kept = replace(SHARDINGS["fsdp2"], keeps_layers=True)
    found = update_transfer_bytes(make("fsdp2", 4, sharding=kept, **settings))
    assert found == 0.75 * (2 * 2000 + 2 * 4000)


def test_transfers_hide_behind_computing_unless_they_are_longer():
    fast = replace(UNIT, link=math.inf)
    hidden = estimate_seconds(make("fsdp2", 4, device=fast))
    alone = estimate_seconds(make(device=fast))
    assert hidden["update"] == pytest.approx(alone["update"], rel=0.2)  # its share of the optimizer
    slow = replace(UNIT, link=1e-3)
    found = estimate_seconds(make("fsdp2", 4, device=slow))
    assert found["update"] == 0.75 * 3 * 4000 / (1e-3 * seconds.LINK_SHARE)
    assert found.binding.bound_by == "transfers between GPUs"
    assert "max_tokens_per_micro_batch, so that weights" in found.binding.advice
    second = estimate_seconds(make("deepspeed_stage_2", 4, device=slow)).binding.advice
    assert "max_tokens_per_micro_batch, so that gradients" in second
    assert "deepspeed_stage_1" in second
    assert "minibatches" in estimate_seconds(make("ddp", 4, device=slow)).binding.advice


def test_weights_are_gathered_or_sent_once_a_step():
    gathering = estimate_seconds(make("fsdp2", 4, device=UNIT))
    assert gathering["weight sync"] == 0.75 * 4000 / seconds.LINK_SHARE
    files = estimate_seconds(make(device=UNIT, sampler=Sampler(kind="servers", transfer="disk")))
    assert files["weight sync"] == 2 * 2 * 1000 / seconds.DISK_RATE
    sampler = Sampler(kind="servers", transfer="disk", sends_adapter=True)
    adapter = estimate_seconds(make(device=UNIT, model=adapted(), sampler=sampler))
    assert adapter["weight sync"] == 2 * 2 * 100 / seconds.DISK_RATE
    assert estimate_seconds(make(device=UNIT))["weight sync"] == 0


def test_servers_sample_for_all_ranks():
    def sampling(num_gpus: int) -> float:
        sampler = Sampler(kind="servers", num_gpus=num_gpus)
        cluster = Cluster(device=DEVICES["H100"], per_node=8)
        return estimate_seconds(make("ddp", 8, cluster=cluster, sampler=sampler))["generation"]

    # 10 passes of the server for each batch, and next to nothing to compute.
    assert sampling(1) == pytest.approx(10 * seconds.SERVER_PASS_SECONDS, rel=0.1)
    assert sampling(8) < sampling(1)


def test_scoring_is_known_for_rules_only():
    assert estimate_seconds(make(), 100)["scoring"] == pytest.approx(100 * 30e-6)
    unknown = [one for one in estimate_seconds(make()).parts if one.seconds is None]
    assert [one.name for one in unknown] == ["scoring"]


def test_the_time_of_offloading_is_not_known():
    sharding = replace(SHARDINGS["fsdp2"], offloads_optimizer=True)
    found = estimate_seconds(make("fsdp2", 2, sharding=sharding), 1)
    assert [one.name for one in found.parts if one.seconds is None] == ["offloading"]
