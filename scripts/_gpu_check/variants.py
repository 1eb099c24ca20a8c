"""Take steps in the ways that only a GPU can show: with small states, sharded, compiled."""

from __future__ import annotations

import gc
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from _gpu_check.device import Device
from _gpu_check.findings import Recorder
from _gpu_check.sizes import CheckSize
from _gpu_check.steps import SAMPLER_LIMIT, STEADY_METRICS, Observer, train

from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.training import MasterAdamW

NUM_STEPS = 2
"""The second one shows that the weights of the first have arrived where they are sampled from."""
NUM_LAYERS = 2
"""Of the model: its layers are alike, and compiling all of them would take minutes."""
LEAST_SECONDS = 25
"""Below this there is no time for a further variant."""
DEEPSPEED = "DeepSpeed stage 3 on one GPU"
IN_8_BITS = "bfloat16 weights, AdamW in 8 bits"
PACKAGES = {DEEPSPEED: "deepspeed", IN_8_BITS: "torchao"}
"""Package that a variant needs."""


def in_8_bits(parameters: Any, **settings: Any) -> Any:
    """Make an optimizer that rounds the weights at random, as 7B on one GPU of 80 GB needs it."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, bf16_stochastic_round=True, **settings)


VARIANTS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bfloat16 weights, MasterAdamW": {"dtype": "bfloat16", "optimizer": MasterAdamW},
    IN_8_BITS: {"dtype": "bfloat16", "optimizer": in_8_bits, "gradient_checkpointing": True},
    "FSDP2 on one GPU": {"strategy": "fsdp2"},
    "FSDP2, weights and optimizer in host memory": {
        "strategy": partial(FSDP2Strategy, cpu_offload=True)
    },
    "policy.compile": {"compile": True},
    DEEPSPEED: {"strategy": "deepspeed_stage_3"},
}


def check_variants(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Take steps in each variant, and record whether they train."""
    small = replace(size, model=replace(size.model, num_layers=NUM_LAYERS))
    for name, options in VARIANTS.items():
        if device.name == "pretend":
            recorder.skip(name, "variants are not tried on the stand-in.")
        elif name in PACKAGES and find_spec(PACKAGES[name]) is None:
            recorder.skip(name, f"{PACKAGES[name]} is not installed.")
        elif recorder.seconds_left < LEAST_SECONDS:
            recorder.skip(name, f"{recorder.seconds_left:.0f} s were left.")
        else:
            with recorder.attempt(name), compiler(device):
                check_steps(recorder, name, device, small, options)
        gc.collect()  # what the variant has on the device


def compiler(device: Device) -> AbstractContextManager[Any]:
    """Return a context in which a CPU runs what is traced, without building kernels for it."""
    if device.name == "cuda":
        return nullcontext()
    return patch.object(torch, "compile", partial(torch.compile, backend="eager"))


def check_steps(
    recorder: Recorder, name: str, device: Device, size: CheckSize, options: dict[str, Any]
) -> None:
    observer = Observer(device, {}, lambda: True)
    train(device, size, observer, NUM_STEPS, **options)
    metrics = [step.metrics for step in observer.steps]
    values = [step.get(key, math.nan) for step in metrics for key in STEADY_METRICS]
    norms = [step["policy/grad_norm"] for step in metrics]
    trains = len(metrics) == NUM_STEPS and all(map(math.isfinite, values)) and min(norms) > 0
    shown = ", ".join(f"{norm:.3g}" for norm in norms)
    recorder.state(f"{name}: {NUM_STEPS} steps train", trains, f"norms of the gradient: {shown}.")
    recorder.decide(
        f"{name}: sampler against trainer, mean difference of a logprob",
        max(step["sampler/logprob_difference_mean"] for step in metrics),
        SAMPLER_LIMIT,
        "both round to bfloat16, token by token and in packs.",
    )
    recorder.figure(f"{name}: last step", observer.steps[-1].seconds, "s")
