"""Estimate the seconds of each part of a rollout step on a cluster, and what limits it.

A pass takes the sum of its matrix products and of its memory traffic, since kernels run one after
another; on a GPU it takes no less than Python needs to issue them. Transfers between GPUs overlap
with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from lit_grpo.cli.estimate.devices import GB, Device
from lit_grpo.cli.estimate.setup import BFLOAT16, Sampler, Setup
from lit_grpo.cli.estimate.work import (
    Work,
    decode_work,
    forward_work,
    prefill_work,
    tokens_of,
    update_work,
    waves,
)

PRODUCT_SHARE = 0.7
"""Share of the rate of large matrix products that a model's reach on a GPU, due to smaller shapes,
and clocks that fall under load."""
MEMORY_SHARE = 0.8
"""Share of the memory's rate that kernels reach which read and write once."""
LINK_SHARE = 0.8
"""Share of a link's rate that NCCL reaches with large messages."""
TENSOR_PARALLEL_SHARE = 0.8
"""Share of the GPUs of a server with tensor parallelism that does not wait for the others."""
SERVER_PASS_SECONDS = 2e-3
"""Time of a server between two tokens of a batch, apart from the model: vLLM schedules, samples and
sends on the CPU. With CUDA graphs, issuing kernels takes no time."""
DISK_RATE = 1.0 * GB
"""Bytes per second at which weights go through files, written and read."""
SECONDS_PER_SCORE = 30e-6
"""Seconds of a reward that follows rules, as measured for MathReward (docs/log.md)."""

COMPUTE, MEMORY, HOST = "matrix products", "memory bandwidth", "issuing kernels from Python"
SMALL = "the overhead of each operation"
LINKS, FILES = "transfers between GPUs", "reading and writing files"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of a step; its seconds are None if they are not known."""

    name: str
    seconds: float | None
    bound_by: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a rollout step."""

    parts: tuple[TimePart, ...]

    @property
    def total(self) -> float:
        """The sum of the parts whose seconds are known."""
        return sum(one.seconds or 0.0 for one in self.parts)

    @property
    def binding(self) -> TimePart:
        return max(self.parts, key=lambda one: one.seconds or 0.0)

    def __getitem__(self, name: str) -> float:
        """Return the seconds of all parts whose name has this prefix."""
        return sum(one.seconds or 0.0 for one in self.parts if one.name.startswith(name))


def estimate_seconds(setup: Setup, num_scores: int | None = None) -> StepTime:
    """Return the seconds of a rollout step.

    Args:
        num_scores: Scores of rewards that follow rules, on a rank; None if the time of scoring is
            not known.
    """
    parts = [
        *_generation(setup),
        _scoring(num_scores),
        *_logprobs(setup),
        _update(setup),
        *_offloading(setup),
        _weight_sync(setup),
    ]
    return StepTime(tuple(one for one in parts if one.seconds is None or one.seconds > 0))


def seconds_of(work: Work, device: Device, *, compute_bytes: float) -> tuple[float, str]:
    """Return the seconds of some work, and what limits it."""
    rate = device.flops if compute_bytes == BFLOAT16 else device.flops_float32
    rate *= PRODUCT_SHARE if device.is_gpu else 1.0
    attention = rate * device.attention_share
    if work.few_rows:
        is_16 = compute_bytes == BFLOAT16
        rate *= device.few_rows_share_16 if is_16 else device.few_rows_share
        attention *= device.few_rows_attention_share
    products = work.flops / rate + work.attention / attention
    moving = work.bytes / (device.bandwidth * (MEMORY_SHARE if device.is_gpu else 1.0))
    moving += work.fresh / device.fresh_bandwidth
    host = work.layers * device.host_seconds_per_layer
    host += work.passes * device.host_seconds_per_pass
    largest = COMPUTE if products >= moving else MEMORY
    if not device.is_gpu:
        return products + moving + host, SMALL if host > max(products, moving) else largest
    return max(products + moving, host), HOST if host > products + moving else largest


def _generation(setup: Setup) -> Iterator[TimePart]:
    if setup.sampler.kind == "none":
        return
    if setup.sampler.kind == "policy":
        yield from _own_generation(setup)
        return
    sampler, step = setup.sampler, setup.step
    copies = sampler.num_gpus // sampler.gpus_per_copy if sampler.kind == "servers" else setup.ranks
    ranks = setup.ranks / max(1, copies)
    rows = step.num_rows * ranks
    # Completions of each copy run together up to its limit; the longest takes all its tokens.
    together = min(rows, sampler.max_concurrent * max(1.0, ranks))
    passes = step.completion_tokens * ceil(rows / together)
    work = decode_work(setup, rows, step.mean_completion_tokens, passes, dtype=sampler.value_bytes)
    prefill = prefill_work(setup, ranks)
    speed = sampler.gpus_per_copy * (TENSOR_PARALLEL_SHARE if sampler.gpus_per_copy > 1 else 1)
    device, dtype = setup.cluster.device, sampler.value_bytes
    prompts, bound = seconds_of(_graphed(prefill), device, compute_bytes=dtype)
    yield TimePart(name="generation: prompts", seconds=prompts / speed, bound_by=bound)
    tokens, bound = seconds_of(_graphed(work), device, compute_bytes=dtype)
    yield TimePart(
        name="generation: tokens",
        seconds=tokens / speed + passes * SERVER_PASS_SECONDS,
        bound_by=bound,
        advice=_generation_advice(sampler),
    )


def _graphed(work: Work) -> Work:
    """Return the work without issuing kernels, which CUDA graphs replay."""
    return replace(work, layers=0.0, passes=0.0)


def _own_generation(setup: Setup) -> Iterator[TimePart]:
    step, device = setup.step, setup.cluster.device
    prompts, bound = seconds_of(prefill_work(setup), device, compute_bytes=setup.compute_bytes)
    yield TimePart(name="generation: prompts", seconds=prompts, bound_by=bound)
    # The first token comes from the prompt.
    passes = (step.completion_tokens - 1) * waves(setup)
    tokens = max(0.0, step.mean_completion_tokens - 1)
    work = decode_work(setup, step.num_rows, tokens, passes, dtype=0)
    seconds, bound = seconds_of(work, device, compute_bytes=setup.compute_bytes)
    engine = "vllm" if setup.ranks == 1 else "vllm_server"  # in a process it serves one rank
    advice = (
        f"sample with vLLM (--config engines/{engine}), or raise "
        "model.engine.init_args.max_concurrent if there are more completions"
    )
    if not device.is_gpu:
        advice = _FEWER_TOKENS
    yield TimePart(name="generation: tokens", seconds=seconds, bound_by=bound, advice=advice)


def _generation_advice(sampler: Sampler) -> str:
    if sampler.kind == "servers":
        return (
            "use more GPUs for servers (launch.num_servers), or sample during the update "
            "(model.max_head_offpolicyness)"
        )
    return "sample with servers on GPUs of their own (--config engines/vllm_server)"


def _scoring(num_scores: int | None) -> TimePart:
    """Return the time of scoring, which overlaps generation except for the last completions."""
    seconds = None if num_scores is None else num_scores * SECONDS_PER_SCORE
    return TimePart(
        name="scoring",
        seconds=seconds,
        bound_by="rules" if num_scores else "",
        advice="" if num_scores else "measure it with lit-grpo rewards",
    )


def _logprobs(setup: Setup) -> Iterator[TimePart]:
    """Yield the forward passes before the update."""
    work, gathered = forward_work(setup), tokens_of(setup).micro_batches
    teacher = setup.teacher_parameters / setup.model.parameters
    passes = (
        ("logprobs of the old policy", setup.old_passes, _ONE_STEP),
        ("logprobs of the reference", setup.reference_passes, _NO_KL),
        ("logprobs of the teacher", teacher, "move the teacher to a server (model.teacher.urls)"),
    )
    for name, times, advice in passes:
        computing, bound = seconds_of(
            work * times, setup.cluster.device, compute_bytes=setup.compute_bytes
        )
        moved = gather_bytes(setup) * gathered if times else 0.0
        seconds, bound = _overlapped(setup, computing, moved, bound)
        yield TimePart(name=name, seconds=seconds, bound_by=bound, advice=advice)


_FEWER_TOKENS = "lower model.sampling.max_tokens or model.group_size"
_ONE_STEP = "set model.update.epochs and minibatches to 1, which needs no old logprobs"
_NO_KL = "set model.objective.kl.coef to 0"


def gather_bytes(setup: Setup) -> float:
    """Return the bytes that a rank receives to have each layer once."""
    if not setup.sharding.weights:
        return 0.0
    share = (setup.ranks - 1) / setup.ranks
    return share * setup.model.parameters * setup.gathered_bytes


def update_transfer_bytes(setup: Setup) -> float:
    """Return the bytes that a rank receives in an epoch of the update.

    Each micro-batch gathers the layers for both passes, unless they stay. Where weights are
    divided, gradients are reduced to the part of each rank (1 x their bytes), elsewhere on all
    ranks (2 x), also by stages 1 and 2 of DeepSpeed.
    """
    sharding, steps = setup.sharding, setup.step.optimizer_steps / setup.step.epochs
    share = (setup.ranks - 1) / setup.ranks
    parts = tokens_of(setup).micro_batches
    trained = share * setup.model.trained_parameters * setup.model.trained_bytes
    gathered = (1 if sharding.keeps_layers else 2) * gather_bytes(setup) * parts
    reductions = parts if sharding.gradients else steps
    gathered += (1 if sharding.weights else 2) * trained * reductions
    if sharding.optimizer and not sharding.weights:  # the updated weights come back
        gathered += trained * steps
    return gathered


def _overlapped(setup: Setup, seconds: float, moved: float, bound: str) -> tuple[float, str]:
    """Return the longer of computing and of receiving some bytes, and what limits it."""
    if not moved:
        return seconds, bound
    moving = moved / (setup.cluster.collective_rate * LINK_SHARE)
    return max(seconds, moving), LINKS if moving > seconds else bound


_TRANSFERS_OF_WEIGHTS = (
    "raise model.update.max_tokens_per_micro_batch, so that weights are gathered less often, or "
    "use a strategy that divides less (deepspeed_stage_2, ddp)"
)
_TRANSFERS_OF_GRADIENTS = (
    "raise model.update.max_tokens_per_micro_batch, so that gradients are divided less often, or "
    "use a strategy that divides less (deepspeed_stage_1, ddp)"
)
_TRANSFERS_OF_STEPS = "lower model.update.minibatches, whose gradients are all shared"


def _update(setup: Setup) -> TimePart:
    computing, bound = seconds_of(
        update_work(setup), setup.cluster.device, compute_bytes=setup.compute_bytes
    )
    seconds, bound = _overlapped(setup, computing, update_transfer_bytes(setup), bound)
    advice = "use more GPUs" if setup.cluster.is_gpu else _FEWER_TOKENS
    if bound == LINKS:
        advice = _TRANSFERS_OF_WEIGHTS if setup.sharding.weights else _TRANSFERS_OF_STEPS
        if setup.sharding.gradients and not setup.sharding.weights:
            advice = _TRANSFERS_OF_GRADIENTS
    elif setup.checkpointing:
        advice = "set model.policy.gradient_checkpointing to false if the memory allows it"
    elif setup.precision == "32-true" and setup.cluster.is_gpu:
        advice = "set trainer.precision to bf16-mixed"
    epochs = setup.step.epochs
    return TimePart(name="update", seconds=seconds * epochs, bound_by=bound, advice=advice)


def _offloading(setup: Setup) -> Iterator[TimePart]:
    """Yield the time of what is in host memory, which depends on its machine."""
    sharding = setup.sharding
    if setup.cluster.is_gpu and (sharding.offloads_weights or sharding.offloads_optimizer):
        advice = "moving to host memory and computing there"
        yield TimePart(name="offloading", seconds=None, advice=advice)


def _weight_sync(setup: Setup) -> TimePart:
    """Return the time of the weight sync; if the policy itself samples, only of gathering."""
    sampler, device = setup.sampler, setup.cluster.device
    name = "weight sync"
    whole = gather_bytes(setup)
    rate = setup.cluster.collective_rate * LINK_SHARE
    gathering = whole / rate if whole else 0.0
    if sampler.kind in ("policy", "none"):
        return TimePart(name=name, seconds=gathering, bound_by=LINKS)
    parameters = setup.model.parameters
    if sampler.sends_adapter:
        parameters = setup.model.trained_parameters
    size = parameters * sampler.value_bytes
    if sampler.kind == "vllm":
        copying = 2 * size / (device.bandwidth * MEMORY_SHARE)
        return TimePart(name=name, seconds=gathering + copying, bound_by=MEMORY)
    if sampler.transfer == "nccl":
        return TimePart(name=name, seconds=gathering + size / rate, bound_by=LINKS)
    return TimePart(
        name=name,
        seconds=gathering + 2 * size / DISK_RATE,
        bound_by=FILES,
        advice="set model.engine.init_args.weight_transfer to nccl",
    )
