"""What the cost of a step depends on, by the settings of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from setups import SIZES, UNIT, make
from tiny import LLAMA
from torch.optim import AdamW

from lit_grpo.cli.estimate.devices import DEVICES, Cluster
from lit_grpo.cli.estimate.setup import make_setup, parse_precision
from lit_grpo.policy import LoRA, Policy
from lit_grpo.training import MasterAdamW
from lit_grpo.types import UserError


class RoundsAtRandom(AdamW):
    bf16_stochastic_round = True


@pytest.mark.parametrize(
    ("settings", "optimizer", "message"),
    [
        ({"precision": "bf16-true"}, AdamW, "precision must be 32-true or bf16-mixed, got bf16-t"),
        ({"precision": "16-true"}, AdamW, "precision must be 32-true or bf16-mixed, got 16-true"),
        ({"strategy": "fsdp"}, AdamW, "strategy must be auto, ddp, fsdp2 .* got fsdp "),
        ({"strategy": "deepspeed_stage_2"}, AdamW, "dtype must be float32 under DeepSpeed"),
        ({"strategy": "fsdp2"}, RoundsAtRandom, "dtype must be float32 with trainer.strategy fsd"),
        ({"strategy": "fsdp2"}, MasterAdamW, "dtype must be float32 with trainer.strategy fsdp2"),
        ({}, RoundsAtRandom, "bf16_stochastic_round must be false on several processes, got .* 2"),
    ],
)
def test_a_run_that_would_be_refused_is_not_planned(settings, optimizer, message):
    outline = Policy(architecture=LLAMA, dtype="bfloat16").outline()
    cluster = Cluster(device=DEVICES["H100"], per_node=2)
    with pytest.raises(UserError, match=message):
        make_setup(outline, optimizer, make().step, cluster, **settings)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, "32-true"), (32, "32-true"), ("bf16", "bf16-mixed"), ("bf16-mixed", "bf16-mixed")],
)
def test_a_precision_may_be_written_as_lightning_takes_it(given, meant):
    assert parse_precision(given) == meant


BF16 = replace(SIZES, parameter_bytes=2)
MIXED = {"precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("strategy", "settings", "compute", "activation", "gathered"),
    [
        ("single", {}, 4, 4, 4),
        ("single", MIXED, 2, 3, 4),  # autocast: half of the activations stay float32
        ("single", {"model": BF16}, 2, 2, 2),
        ("single", MIXED | {"model": BF16}, 2, 2, 2),
        ("fsdp2", {}, 4, 4, 4),
        ("fsdp2", MIXED, 2, 2, 2),  # it casts its shards before it gathers them
        ("ddp", MIXED, 2, 3, 4),
    ],
)
def test_values_are_as_large_as_the_precision_and_the_weights_make_them(
    strategy, settings, compute, activation, gathered
):
    setup = make(strategy, 1 if strategy == "single" else 2, **settings)
    found = (setup.compute_bytes, setup.activation_bytes, setup.gathered_bytes)
    assert found == (compute, activation, gathered)


def test_only_what_is_divided_has_shares():
    setup = make("fsdp2", 4)
    assert (setup.ranks, setup.share(True), setup.share(False)) == (4, 4, 1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MIXED, True),
        ({}, False),
        (MIXED | {"device": UNIT}, False),
        (MIXED | {"compiles": True}, False),
        (MIXED | {"model": replace(SIZES, caps_scores=True)}, False),
    ],
)
def test_attention_has_no_masks_on_a_gpu_in_16_bits(settings, expected):
    assert make(**settings).merges_attention == expected


@pytest.mark.parametrize(
    ("lora", "settings", "size"),
    [
        (None, {}, 0),
        (None, {"with_reference": True}, 4),
        (None, {"refreshes_reference": True}, 0),
        (LoRA(rank=2), {"with_reference": True}, 0),  # the model without its adapter
        (LoRA(rank=2), {"refreshes_reference": True}, 4),
    ],
)
def test_a_reference_is_a_second_model_or_a_second_adapter(lora, settings, size):
    outline = Policy(architecture=LLAMA, lora=lora).outline()
    setup = make_setup(outline, AdamW, make().step, Cluster(device=UNIT), **settings)
    expected = size * setup.model.trained_parameters
    assert setup.reference_bytes - expected in range(200)  # buffers
    assert bool(setup.reference_bytes) == bool(size)
