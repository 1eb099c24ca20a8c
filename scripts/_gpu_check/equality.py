"""Check that logprobs and gradients do not depend on device, packing and, nearly, on precision.

The model has random weights. Float32 on a GPU means that TF32 is off, as it is by default.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from _gpu_check.device import Device
from _gpu_check.findings import Recorder
from _gpu_check.sizes import CheckSize
from torch import Tensor

from lit_grpo.policy import Policy
from lit_grpo.policy.body_and_head import BodyAndHead
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.policy.packed import packed_attention
from lit_grpo.policy.packed.merged_attention import merged_attention
from lit_grpo.policy.packed.packed_attention import FLASH_DEVICES
from lit_grpo.types import TokenBatch

FLOAT32_LIMIT = 1e-4
FLOAT32_WHY = "another order of float32 sums gave 2e-6 on a CPU; a wrong mask or position, 0.1."
BFLOAT16_LIMIT = 0.03
BFLOAT16_WHY = "logits of width 0.6, rounded to 0.4% in 24 layers, gave 0.010 on a CPU."
GRADIENT_LIMIT = 0.08
GRADIENT_WHY = "the same rounding, forward and backward, gave 0.025 on a CPU."
RATIO_LIMIT = 1.25
RATIO_WHY = "packed operators round as often as padded ones: 1.02 on a CPU."


@dataclass(frozen=True)
class Computed:
    """Logprobs of the completion tokens, float64 on the CPU, and the gradient, by parameter."""

    logprobs: Tensor
    gradients: list[Tensor]


def check_equality(recorder: Recorder, device: Device, size: CheckSize) -> None:
    batch, policy = size.ragged_batch(), size.loaded_policy()
    with recorder.attempt("the model can be packed"):
        recorder.state("the model can be packed", policy.body_and_head.uses_packing)
    with recorder.attempt("float32: this device against the CPU"):
        on_cpu = logprobs_of(policy, batch, packed=False, precision="32-true", device=None)
        policy.to(device.device)
        on_device = logprobs_of(policy, batch, packed=False, precision="32-true", device=device)
        recorder.decide(
            "float32: this device against the CPU, largest difference of a logprob",
            float((on_device - on_cpu).abs().max()),
            FLOAT32_LIMIT,
            FLOAT32_WHY,
        )
    padded = packed = None
    with recorder.attempt("float32: packed against padded"):
        padded = compute(policy, batch, packed=False, precision="32-true", device=device)
        packed = compute(policy, batch, packed=True, precision="32-true", device=device)
        _check_float32(recorder, packed, padded)
    if padded is None or packed is None:
        recorder.skip("bfloat16", "there is nothing in float32 to compare with.")
        return
    del packed
    if not device.casts:
        recorder.skip("bfloat16", "this device has no automatic casts.")
        return
    with recorder.attempt("bfloat16 against float32"):
        _check_bfloat16(recorder, policy, batch, padded, device)


def _check_float32(recorder: Recorder, packed: Computed, padded: Computed) -> None:
    recorder.decide(
        "float32: packed against padded, largest difference of a logprob",
        float((packed.logprobs - padded.logprobs).abs().max()),
        FLOAT32_LIMIT,
        FLOAT32_WHY,
    )
    recorder.decide(
        "float32: packed against padded, relative difference of the gradient",
        relative_difference(packed, padded),
        FLOAT32_LIMIT,
        FLOAT32_WHY,
    )


def _check_bfloat16(
    recorder: Recorder, policy: Policy, batch: TokenBatch, exact: Computed, device: Device
) -> None:
    errors = {}
    for packed in (True, False):
        how = "packed" if packed else "padded"
        with merges() as merged:
            computed = compute(policy, batch, packed=packed, precision="bf16-mixed", device=device)
        if packed and device.name in FLASH_DEVICES:
            recorder.state(
                "bfloat16: variable-length FlashAttention runs the pack",
                merged.called,
                f"called {merged.call_count} times; without it every completion has a copy of its "
                "prompt's keys and values.",
            )
        errors[how] = float((computed.logprobs - exact.logprobs).square().mean().sqrt())
        recorder.decide(
            f"bfloat16 against float32, {how}: root mean square difference of a logprob",
            errors[how],
            BFLOAT16_LIMIT,
            BFLOAT16_WHY,
        )
        recorder.decide(
            f"bfloat16 against float32, {how}: relative difference of the gradient",
            relative_difference(computed, exact),
            GRADIENT_LIMIT,
            GRADIENT_WHY,
        )
    recorder.decide(
        "bfloat16: error of packed against error of padded",
        errors["packed"] / max(errors["padded"], 1e-12),
        RATIO_LIMIT,
        RATIO_WHY,
    )


def merges() -> Any:
    """Return a context that gives a record of the calls of merged attention."""
    return patch.object(packed_attention, "merged_attention", wraps=merged_attention)


def precision_context(precision: str, device: Device | None) -> Any:
    """Return the context in which Lightning runs a training step in this precision."""
    if precision == "32-true":
        return nullcontext()
    kind = "cpu" if device is None else device.device.type
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False)


@torch.no_grad()
def logprobs_of(
    policy: Policy, batch: TokenBatch, *, packed: bool, precision: str, device: Device | None
) -> Tensor:
    return compute(
        policy, batch, packed=packed, precision=precision, device=device, backward=False
    ).logprobs


def compute(
    policy: Policy,
    batch: TokenBatch,
    *,
    packed: bool,
    precision: str,
    device: Device | None,
    backward: bool = True,
) -> Computed:
    """Return logprobs, and the gradient of their sum with weights of both signs."""
    model = BodyAndHead(policy.model, use_packing=packed)
    with precision_context(precision, device):
        logprobs = completion_statistics(model, batch).logprobs
    mask = batch.completion_mask
    gradients: list[Tensor] = []
    if backward:
        weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(2))
        (logprobs * weights.to(logprobs.device)).sum().backward()
        for parameter in policy.model.parameters():
            assert parameter.grad is not None
            gradients.append(parameter.grad)
            parameter.grad = None
    return Computed(logprobs.detach().cpu().double()[mask], gradients)


def relative_difference(ours: Computed, exact: Computed) -> float:
    """Return the norm of the difference of two gradients, relative to that of the second."""
    difference = sum(
        float((a - b).square().sum()) for a, b in zip(ours.gradients, exact.gradients, strict=True)
    )
    return float((difference / sum(float(b.square().sum()) for b in exact.gradients)) ** 0.5)
