"""Estimate the memory of a rank: each part, when it exists, and which setting changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lit_grpo.cli.estimate import memory_formulas as formulas
from lit_grpo.cli.estimate.devices import GIB
from lit_grpo.cli.estimate.setup import Setup
from lit_grpo.policy.files.model_files import file_bytes

CUDA_CONTEXT = GIB // 2
NCCL_BUFFERS = GIB
"""Bytes that NCCL allocates for its channels on a GPU."""

Moments = tuple[str, ...]
ALWAYS, FORWARD, LAYERS = "always", "in the head's chunks", "in a layer's backward pass"
ENDING = "at the end of the backward pass"
STEPPING, SAMPLING, SAVING = "in the optimizer's step", "while sampling", "while saving"
ELSEWHERE: Moments = ()
"""Moments of a part in host memory, which is never in the memory of the GPU."""
UPDATE = (FORWARD, LAYERS)
WITH_GRADIENTS = (ENDING, STEPPING, SAMPLING, SAVING)
"""When the gradients of a single micro-batch exist: they are freed before its forward pass."""

LORA = "train an adapter instead of all weights (model.policy.lora: {rank: 16, alpha: 32})"
SHARD = "divide it by the ranks (trainer.strategy: fsdp2)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of the memory; one whose ``when`` is `ELSEWHERE` is in host memory."""

    name: str
    bytes: int
    when: Moments = (ALWAYS,)
    advice: str = ""

    def is_there(self, moment: str) -> bool:
        return ALWAYS in self.when or moment in self.when


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory of one process."""

    parts: tuple[MemoryPart, ...]

    def during(self, moment: str) -> int:
        return sum(one.bytes for one in self.parts if one.is_there(moment))

    @property
    def peak(self) -> int:
        return self.during(self.moments[0])

    @property
    def moments(self) -> list[str]:
        """Moments with memory of their own, the largest first; ``always`` if there are none."""
        found = {moment: 0 for one in self.parts for moment in one.when}
        found.pop(ALWAYS, None)
        return sorted(found, key=self.during, reverse=True) or [ALWAYS]

    @property
    def at_peak(self) -> list[MemoryPart]:
        """The parts that exist at the peak, the largest first."""
        there = [one for one in self.parts if one.is_there(self.moments[0])]
        return sorted(there, key=lambda one: -one.bytes)

    @property
    def binding(self) -> MemoryPart:
        """The largest part of the peak that a setting changes, else the largest of all."""
        with_advice = [one for one in self.at_peak if one.advice]
        return (with_advice or self.at_peak)[0]

    def advice(self) -> list[str]:
        """Return the settings that save most at the peak, the best first."""
        found = (one.advice for one in self.at_peak if one.advice and one.bytes)
        return list(dict.fromkeys(found))[:2]


def estimate_memory(setup: Setup, fixed: MemoryPart | None = None) -> MemoryEstimate:
    """Return the memory that a rank needs.

    Args:
        fixed: What the process takes before it loads anything; None for a CUDA context.
    """
    parts = [
        fixed or MemoryPart(name="CUDA", bytes=CUDA_CONTEXT),
        *_states(setup),
        *_communication(setup),
        *_update(setup),
        *_sampling(setup),
        *_scoring(setup),
        *_saving(setup),
    ]
    return MemoryEstimate(tuple(one for one in parts if one.bytes))


def _states(setup: Setup) -> Iterator[MemoryPart]:
    """Yield what exists during the whole run."""
    model, sharding = setup.model, setup.sharding
    trained, has_lora = model.trained_parameters, model.has_adapter
    share = setup.share(sharding.weights)
    when: Moments
    of_weights = _place(setup, (ALWAYS,), is_offloaded=sharding.offloads_weights)
    stored = model.parameters * model.parameter_bytes / share + model.buffer_bytes
    smaller = "set model.policy.dtype to bfloat16" if model.parameter_bytes > 3 else ""
    moves = smaller if has_lora else _sharding_or(setup, LORA, is_divided=sharding.weights)
    yield MemoryPart(name="weights", bytes=round(stored), when=of_weights, advice=moves)
    advice = "" if has_lora else _sharding_or(setup, LORA, is_divided=sharding.gradients)
    when = _place(setup, _with_gradients(setup), is_offloaded=sharding.offloads_optimizer)
    yield MemoryPart(
        name="gradients", bytes=formulas.gradient_bytes(setup), when=when, advice=advice
    )
    advice = "" if has_lora else _sharding_or(setup, LORA, is_divided=sharding.optimizer)
    when = _place(setup, (ALWAYS,), is_offloaded=sharding.offloads_optimizer)
    divided = setup.share(sharding.optimizer)
    copied = round(trained * model.trained_bytes * sharding.copies_weights / divided)
    yield MemoryPart(name="optimizer's copy of the weights", bytes=copied, when=when, advice=advice)
    state = round(setup.optimizer.state_bytes / divided)
    yield MemoryPart(name="optimizer", bytes=state, when=when, advice=advice)
    copy = formulas.optimizer_copy_bytes(setup)
    fused = "set model.optimizer.init_args.fused to true" if setup.optimizer.copies else ""
    when = _place(setup, (STEPPING,), is_offloaded=sharding.offloads_optimizer)
    yield MemoryPart(name="copies of the optimizer", bytes=copy, when=when, advice=fused)
    kl = "set model.objective.kl.coef to 0, or train an adapter (model.policy.lora), whose base is "
    adapter = "" if has_lora else f"{kl}the reference"
    size = round(setup.reference_bytes / setup.share(sharding.weights and not has_lora))
    yield MemoryPart(name="reference", bytes=size, when=of_weights, advice=adapter)
    bfloat16 = "set model.teacher.dtype to bfloat16, or move it to a server: model.teacher.urls"
    yield MemoryPart(name="teacher", bytes=setup.teacher_bytes, advice=bfloat16)
    elsewhere = "set dtype of ScorerReward to bfloat16, or its device to another one"
    yield MemoryPart(name="reward models", bytes=setup.scorer_bytes, advice=elsewhere)


def _with_gradients(setup: Setup) -> Moments:
    """Return when gradients exist; DeepSpeed frees them in its step, except in stage 3."""
    has_one, sharding = setup.step.micro_batches == 1, setup.sharding
    if sharding.is_deepspeed and not sharding.weights:
        return (ENDING, STEPPING) if has_one else (*UPDATE, ENDING, STEPPING)
    return WITH_GRADIENTS if has_one and not sharding.is_deepspeed else (ALWAYS,)


def _place(setup: Setup, when: Moments, *, is_offloaded: bool) -> Moments:
    """Return when a part takes memory, which on a CPU it does in any case."""
    return ELSEWHERE if is_offloaded and setup.cluster.is_gpu else when


def _sharding_or(setup: Setup, otherwise: str, *, is_divided: bool) -> str:
    """Return the advice to divide something by the ranks, if it is not and there are several."""
    if setup.ranks == 1:
        return otherwise
    return f"use more GPUs, or {otherwise}" if is_divided else SHARD


def _communication(setup: Setup) -> Iterator[MemoryPart]:
    """Yield the buffers of several ranks, and what they gather."""
    if setup.ranks == 1:
        return
    if setup.cluster.is_gpu:
        yield MemoryPart(name="NCCL", bytes=NCCL_BUFFERS)
    sharding, trained = setup.sharding, setup.model.trained_parameters
    if sharding.copies_gradients:
        advice = (
            "set trainer.strategy to {class_path: DDPStrategy, init_args: "
            "{gradient_as_bucket_view: true}}, or to fsdp2"
        )
        size = round(trained * setup.model.trained_bytes)
        yield MemoryPart(name="buckets of ddp", bytes=size, advice=advice)
    buckets, reduced = formulas.bucket_bytes(setup), formulas.reduced_bytes(setup)
    advice = (
        "set trainer.strategy.init_args.config of ZeROStrategy to {zero_optimization: "
        "{reduce_bucket_size: 50000000}}"
    )
    when: Moments = (ALWAYS,) if sharding.weights else (LAYERS, ENDING)
    yield MemoryPart(name="buckets of DeepSpeed", bytes=buckets, when=when, advice=advice)
    yield MemoryPart(name="copy of a bucket", bytes=reduced, when=(LAYERS, ENDING), advice=advice)
    layers = formulas.gathered_layer_bytes(setup)
    yield MemoryPart(name="gathered layers", bytes=layers, when=(*UPDATE, ENDING))
    served = "sample with servers, which need no gathered model (--config engines/vllm_server)"
    model = formulas.gathered_model_bytes(setup)
    yield MemoryPart(name="gathered model", bytes=model, when=(SAMPLING,), advice=served)


def _update(setup: Setup) -> Iterator[MemoryPart]:
    """Yield what the largest micro-batch needs."""
    step = setup.step
    key = "model.update.max_tokens_per_micro_batch"
    fewer = f"lower {key} to {max(step.row_tokens, step.micro_batch_tokens // 2)}"
    if step.budget is None:
        fewer = "lower data.prompts_per_step"
    elif step.micro_batch_rows == 1:
        fewer = "lower model.sampling.max_tokens"
    advice = fewer if setup.checkpointing else "set model.policy.gradient_checkpointing to true"
    kept = formulas.kept_bytes(setup)
    yield MemoryPart(name="activations", bytes=kept, when=UPDATE, advice=advice)
    copies = formulas.cast_bytes(setup)
    yield MemoryPart(name="weights in bfloat16", bytes=copies, when=UPDATE, advice=advice)
    masks = formulas.mask_bytes(setup)
    yield MemoryPart(name="attention masks", bytes=masks, when=UPDATE, advice=advice)
    logits = formulas.logit_bytes(setup)
    yield MemoryPart(name="logits", bytes=logits, when=(FORWARD,), advice=fewer)
    yield MemoryPart(
        name="gradient of the head", bytes=formulas.head_gradient_bytes(setup), when=(FORWARD,)
    )
    backward = formulas.backward_bytes(setup)
    yield MemoryPart(
        name="a layer's backward pass", bytes=backward, when=(LAYERS, ENDING), advice=fewer
    )


def _sampling(setup: Setup) -> Iterator[MemoryPart]:
    """Yield what the engine needs in the trainer's memory."""
    sampler, key = setup.sampler, "model.engine.init_args"
    if sampler.kind == "policy":
        group, rows = setup.step.group_size, formulas.cache_rows(setup)
        fewer = f"lower {key}.max_concurrent to {max(group, rows // 2)}"
        cache = formulas.cache_bytes(setup)
        yield MemoryPart(name="keys and values", bytes=cache, when=(SAMPLING,), advice=fewer)
        logits, reading = formulas.sampled_logit_bytes(setup), formulas.read_prompt_bytes(setup)
        name = "logits" if logits >= reading else "reading prompts"  # one after the other
        yield MemoryPart(name=name, bytes=max(logits, reading), when=(SAMPLING,), advice=fewer)
        copies = formulas.sampling_cast_bytes(setup)
        yield MemoryPart(name="weights in bfloat16", bytes=copies, when=(SAMPLING,))
        blocked = formulas.blocked_bytes(setup)
        yield MemoryPart(name="blocked weights", bytes=blocked, when=(SAMPLING,))
    elif sampler.kind == "vllm" and setup.cluster.is_gpu:
        sleep = "" if sampler.sleeps else f", or set {key}.sleep to true"
        yield MemoryPart(
            name="vLLM",
            bytes=round(sampler.memory_fraction * setup.cluster.device.memory),
            when=(SAMPLING,) if sampler.sleeps else (ALWAYS,),
            advice=f"lower {key}.memory_fraction{sleep}",
        )
    elif sampler.kind == "servers" and setup.cluster.is_gpu:
        size = round(sampler.memory_fraction * setup.cluster.device.memory)
        advice = f"lower {key}.launch.memory_fraction, or set {key}.launch.devices to other GPUs"
        yield MemoryPart(name="server", bytes=size, advice=advice)


def _scoring(setup: Setup) -> Iterator[MemoryPart]:
    """Yield what reward models need while they score, which they do while others are sampled."""
    yield MemoryPart(
        name="a reward model's batch",
        bytes=setup.scorer_pass_bytes,
        when=(SAMPLING,),
        advice="lower batch_size of ScorerReward",
    )


def _saving(setup: Setup) -> Iterator[MemoryPart]:
    """Yield what checkpoints and the final model need, which are written tensor by tensor."""
    model = setup.model
    # With the adapter's share of it, where one is merged.
    size = round(model.largest_tensor * model.parameter_bytes * (1 + setup.merges))
    yield MemoryPart(name="largest tensor", bytes=size, when=(SAVING,))
    if setup.merges and not setup.cluster.is_gpu:  # else the copies are not in this memory
        sizes = model.parameters, model.largest_tensor
        total, largest = (round(one * model.parameter_bytes) for one in sizes)
        yield MemoryPart(
            name="a file of the model", bytes=file_bytes(total, largest), when=(SAVING,)
        )


def when_in_words(when: Moments) -> str:
    """Return the moments of a part in a few words."""
    if when == ELSEWHERE:
        return "in host memory"
    if when == WITH_GRADIENTS:
        return "except in the forward pass"
    return "in the update" if set(UPDATE) <= set(when) else when[0]


def gib(size: float) -> str:
    """Return a size with three digits: ``1.25 GiB``, or in MiB and KiB below."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if size >= 0.95 * unit:
            digits = ".3g" if size < 1000 * unit else ",.0f"
            return f"{size / unit:{digits}} {name}"
    return f"{size / 1024:.3g} KiB"
