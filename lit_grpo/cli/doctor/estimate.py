"""The memory that a config needs, by what needs it and when, against what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from lit_grpo.cli.doctor.batch import Plan, make_plan
from lit_grpo.cli.doctor.findings import Finding, failed, ok, remark
from lit_grpo.cli.doctor.machine import GIB, Memory, trainer_memory
from lit_grpo.cli.doctor.memory import (
    FLOAT32,
    Transformer,
    activation_bytes,
    cache_bytes,
    copy_bytes,
    gradient_bytes,
    logit_bytes,
    mask_bytes,
    optimizer_bytes,
    size_of,
    sizes_of,
    trained,
    weight_bytes,
)
from lit_grpo.cli.doctor.subject import Subject
from lit_grpo.policy import LocalTeacher
from lit_grpo.policy.loading import outline_model
from lit_grpo.rollout import HFEngine, VLLMEngine
from lit_grpo.rollout.server.engine import ServedEngine

CLOSE = 0.85
"""Share of the available memory above which an estimate may be too low."""
CUDA_CONTEXT = GIB // 2
SERVER_FRACTION = 0.9
"""Share of a GPU that a server takes if launch.memory_fraction is null."""

When = Literal["always", "update", "sampling", "saving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What takes memory, when, and which setting changes it."""

    name: str
    bytes: int
    when: When = "always"
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one process."""

    parts: tuple[Part, ...]

    def during(self, when: When) -> int:
        return sum(one.bytes for one in self.parts if one.when in ("always", when))

    @property
    def peak(self) -> int:
        return max(map(self.during, self.moments))

    @property
    def moments(self) -> list[When]:
        """What takes memory for a time only, the largest first; ``always`` if nothing does."""
        found = {one.when for one in self.parts} - {"always"}
        return sorted(found, key=self.during, reverse=True) or ["always"]

    def advice(self) -> list[str]:
        """Return the settings that save most at the peak, the best first."""
        at_peak = [one for one in self.parts if one.when in ("always", self.moments[0])]
        largest = sorted(at_peak, key=lambda one: -one.bytes)
        return list(dict.fromkeys(one.advice for one in largest if one.advice and one.bytes))[:2]


def estimate(subject: Subject, memory: Memory) -> Estimate:
    """Return the memory that a process of the run needs beside what is fixed.

    Raises:
        NotChecked: the model cannot be read.
    """
    outline, plan = subject.outline.get(), make_plan(subject)
    sizes = sizes_of(outline)
    fixed = CUDA_CONTEXT if memory.is_gpu else psutil.Process().memory_info().rss
    parts = [
        Part(name="Python and libraries" if not memory.is_gpu else "CUDA", bytes=fixed),
        *_states(subject),
        *_update(subject, sizes, plan),
        *_sampling(subject, sizes, plan, memory),
        *_saving(subject),
    ]
    return Estimate(tuple(one for one in parts if one.bytes))


def _states(subject: Subject) -> Iterator[Part]:
    """Yield what exists during the whole run."""
    outline, module = subject.outline.get(), subject.module
    weights = weight_bytes(outline)
    lora = "train an adapter instead of all weights (model.policy.lora: {rank: 16, alpha: 32})"
    smaller = "set model.policy.dtype to bfloat16" if module.policy.dtype == "float32" else ""
    has_lora = module.policy.lora is not None
    yield Part(name="weights", bytes=weights, advice=smaller if has_lora else lora)
    advice = "" if has_lora else lora
    yield Part(name="gradients", bytes=gradient_bytes(outline), advice=advice)
    state = optimizer_bytes(outline, module.make_optimizer)
    yield Part(name="optimizer", bytes=state, advice=advice)
    if module.needs_reference and not has_lora:
        kl = "set model.objective.kl.coef to 0, or train an adapter (model.policy.lora), whose "
        yield Part(name="reference", bytes=weights, advice=f"{kl}base is the reference")
    elif module.refreshes_reference:
        yield Part(name="reference", bytes=size_of(trained(outline)))
    teacher = subject.grpo.teacher if subject.grpo else None
    if isinstance(teacher, LocalTeacher):
        bfloat16 = "set model.teacher.dtype to bfloat16, or move it to a server: model.teacher.urls"
        yield Part(name="teacher", bytes=_teacher_bytes(teacher), advice=bfloat16)


def _teacher_bytes(teacher: LocalTeacher) -> int:
    outline = outline_model(
        teacher.path,
        dtype=teacher.dtype,
        attn_implementation=None,
        trust_remote_code=teacher.trust_remote_code,
        key="model.teacher.path",
    )
    return weight_bytes(outline)


def value_bytes(subject: Subject) -> float:
    """Return the bytes of an activation: with mixed precision, norms and residuals are float32."""
    if subject.module.policy.dtype == "bfloat16":
        return 2
    return 3 if subject.trainer.precision == "bf16-mixed" else FLOAT32


def _bfloat16_copies(subject: Subject) -> int:
    """Return the bytes of the trained weights in the precision that their layers compute in."""
    is_mixed = subject.trainer.precision == "bf16-mixed"
    if not is_mixed or subject.module.policy.dtype != "float32":
        return 0
    return size_of(trained(subject.outline.get())) // 2


def _update(subject: Subject, sizes: Transformer, plan: Plan) -> Iterator[Part]:
    """Yield what the largest micro-batch needs."""
    policy, per_value = subject.module.policy, value_bytes(subject)
    checkpointing = policy.gradient_checkpointing
    key = "model.update.max_tokens_per_micro_batch"
    fewer = f"lower {key} to {max(plan.row_tokens, plan.micro_batch_tokens // 2)}"
    if plan.micro_batch_rows == 1 or subject.grpo is None:
        fewer = "lower model.sampling.max_tokens" if subject.grpo else "lower data.prompts_per_step"
    advice = fewer if checkpointing else "set model.policy.gradient_checkpointing to true"
    tokens = plan.micro_batch_tokens
    activations = activation_bytes(sizes, tokens, per_value, checkpointing=checkpointing)
    yield Part(name="activations", bytes=activations, when="update", advice=advice)
    # Autograd keeps the copy of each trained weight that a layer has computed with.
    copies = _bfloat16_copies(subject)
    in_use = copies // sizes.num_layers if checkpointing else copies
    yield Part(name="weights in bfloat16", bytes=in_use, when="update", advice=advice)
    rows, completion_tokens = plan.micro_batch_rows, plan.completion_tokens
    if not _merges(subject, sizes):
        masks = mask_bytes(sizes, rows, completion_tokens, plan.row_tokens, per_value)
        yield Part(name="attention masks", bytes=masks, when="update", advice=advice)
        copies = copy_bytes(sizes, rows, plan.row_tokens, per_value, checkpointing=checkpointing)
        yield Part(name="copied keys and values", bytes=copies, when="update", advice=advice)
    logits = logit_bytes(rows * completion_tokens, sizes.vocab_size)
    yield Part(name="logits", bytes=logits, when="update", advice=fewer)


def _merges(subject: Subject, sizes: Transformer) -> bool:
    """Return whether attention is likely to run without masks, see `merged_attention`."""
    policy, device = subject.module.policy, subject.trainer.strategy.root_device
    has_kernel = device.type == "cuda" and value_bytes(subject) < FLOAT32 and not sizes.caps_scores
    return has_kernel and policy.packing and not policy.compile_forward


def _sampling(subject: Subject, sizes: Transformer, plan: Plan, memory: Memory) -> Iterator[Part]:
    """Yield what the engine needs in the trainer's memory."""
    engine = subject.module.engine
    if isinstance(engine, HFEngine):
        together = max(1, engine.max_concurrent // plan.group_size) * plan.group_size
        rows = min(plan.num_rows, together)
        key = "model.engine.init_args.max_concurrent"
        fewer = f"lower {key} to {max(plan.group_size, rows // 2)}"
        # Under mixed precision, keys and values come from layers that compute in bfloat16.
        is_float32 = value_bytes(subject) == FLOAT32
        cache = cache_bytes(sizes, rows, plan.row_tokens, FLOAT32 if is_float32 else 2)
        yield Part(name="keys and values", bytes=cache, when="sampling", advice=fewer)
        if not is_float32:  # the engine keeps the copies that the layers compute with
            copies = _bfloat16_copies(subject)
            yield Part(name="weights in bfloat16", bytes=copies, when="sampling", advice="")
        logits = FLOAT32 * 4 * rows * sizes.vocab_size
        yield Part(name="logits", bytes=logits, when="sampling", advice=fewer)
    elif memory.is_gpu:
        yield from _of_engine(engine, memory, subject.trainer.strategy.root_device)


def _of_engine(engine: Any, memory: Memory, device: torch.device) -> Iterator[Part]:
    """Yield the share of the trainer's GPU that an engine with its own weights takes."""
    key = "model.engine.init_args"
    if isinstance(engine, VLLMEngine):
        sleep = "" if engine.sleep else f", or set {key}.sleep to true"
        yield Part(
            name="vLLM",
            bytes=round(engine.memory_fraction * memory.total),
            when="sampling" if engine.sleep else "always",
            advice=f"lower {key}.memory_fraction{sleep}",
        )
    elif isinstance(engine, ServedEngine) and engine.launch is not None:
        launch = engine.launch
        used = None if launch.devices is None else ",".join(launch.devices).split(",")
        if used is not None and str(device.index or 0) not in used:
            return
        fraction = SERVER_FRACTION if launch.memory_fraction is None else launch.memory_fraction
        advice = f"lower {key}.launch.memory_fraction, or set {key}.launch.devices to other GPUs"
        yield Part(name="server", bytes=round(fraction * memory.total), advice=advice)


def _saving(subject: Subject) -> Iterator[Part]:
    """Yield what checkpoints and the final model need, which are written tensor by tensor."""
    outline, policy = subject.outline.get(), subject.module.policy
    largest = max(one.numel() * one.element_size() for one in outline.parameters())
    is_merged = policy.lora is not None and policy.merge_lora  # with the adapter's share of it
    yield Part(name="largest tensor", bytes=largest * (1 + is_merged), when="saving")


def check_memory(subject: Subject) -> Iterator[Finding]:
    """Compare the estimate with what the machine has."""
    device: torch.device = subject.trainer.strategy.root_device
    memory = trainer_memory(device)
    found = estimate(subject, memory)
    num_processes = 1 if memory.is_gpu else subject.trainer.num_devices
    needed = num_processes * found.peak
    moment = found.moments[0]
    during = "" if moment == "always" else f", {_moment(moment)}"
    each = f" for {num_processes} processes" if num_processes > 1 else ""
    has = f"{gib(memory.available)} of the {gib(memory.total)} of {memory.name} are free"
    summary = f"Needs at most about {gib(needed)}{each}{during}; {has}."
    fix = f" To save memory, {'; or '.join(found.advice())}."
    if needed > memory.available:
        yield failed(f"{summary}{fix}")
    elif needed > CLOSE * memory.available:
        yield remark(f"{summary} That is close for an estimate.{fix}")
    else:
        yield ok(summary)
    moments: tuple[When, ...] = ("always", *found.moments)
    for when in dict.fromkeys(moments):
        if parts := [one for one in found.parts if one.when == when]:
            listed = ", ".join(f"{one.name} {gib(one.bytes)}" for one in parts)
            yield ok(f"{_moment(when)}: {listed}")


def _moment(when: When) -> str:
    return {"update": "in the update", "sampling": "while sampling", "saving": "while saving"}.get(
        when, when
    )


def gib(size: float) -> str:
    """Return a size with three digits: ``1.25 GiB``, or in MiB and KiB below."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= 0.95 * unit:
            digits = ".3g" if size < 1000 * unit else ",.0f"
            return f"{size / unit:{digits}} {name}"
    return f"{size / 1024:.3g} KiB"
