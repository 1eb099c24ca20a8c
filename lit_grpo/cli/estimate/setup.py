"""Describe a step on a cluster: everything that its cost depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from lit_grpo.cli.estimate.devices import Cluster
from lit_grpo.cli.estimate.model_sizes import (
    ModelSizes,
    OptimizerSizes,
    build_optimizer,
    optimizer_sizes,
    sizes_of,
    trained,
    weight_bytes,
)
from lit_grpo.cli.estimate.sharding import ShardedParts, sharding_of
from lit_grpo.cli.estimate.step import StepSizes
from lit_grpo.distributed.deepspeed_engine import refuse_layered_head
from lit_grpo.distributed.supported import supported_strategy
from lit_grpo.training.checks.strategies import (
    check_updates,
    refuse_precision,
)

FLOAT32, BFLOAT16 = 4, 2

Precision = Literal["32-true", "bf16-mixed"]
PRECISIONS: dict[str, Precision] = {
    "None": "32-true",
    "32": "32-true",
    "32-true": "32-true",
    "bf16": "bf16-mixed",
    "bf16-mixed": "bf16-mixed",
}
"""Value of ``trainer.precision`` -> its canonical name in Lightning."""
SamplerKind = Literal["policy", "vllm", "servers", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Where completions are sampled, and with what."""

    kind: SamplerKind = "policy"
    """The policy itself, vLLM in the trainer's process, servers, or nothing."""
    max_concurrent: int = 512
    """Completions that are sampled at the same time, by the policy or by each server."""
    value_bytes: int = BFLOAT16
    """Bytes of a weight, a key or a value."""
    num_gpus: int = 1
    """GPUs that sample, over all servers."""
    gpus_per_copy: int = 1
    memory_fraction: float = 0.0
    """Share of the trainer's GPU that it takes; 0 if it has others."""
    sleeps: bool = False
    """Whether it frees that share while nothing is sampled."""
    sends_adapter: bool = False
    transfer: Literal["memory", "disk", "nccl"] = "memory"
    """How it gets the weights."""
    sorts: bool = False
    """Whether top-p sampling sorts the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A step on a cluster."""

    model: ModelSizes
    optimizer: OptimizerSizes
    step: StepSizes
    cluster: Cluster
    sharding: ShardedParts
    precision: Precision = "32-true"
    checkpointing: bool = False
    sampler: Sampler = Sampler()
    reference_bytes: int = 0
    """Bytes of the frozen copy of the weights, or of the adapter, for a KL term."""
    teacher_bytes: int = 0
    teacher_parameters: int = 0
    scorer_bytes: int = 0
    """Bytes of the weights of all reward models on this device."""
    scorer_pass_bytes: int = 0
    """Bytes of a batch that each of them scores."""
    reference_passes: int = 0
    """Forward passes of the reference in a rollout step."""
    old_passes: int = 0
    """Forward passes for the logprobs before the update."""
    merges: bool = False
    """Whether an adapter is merged into the final model."""
    temperature: float = 1.0
    compiles: bool = False

    @property
    def merges_attention(self) -> bool:
        """Whether attention is likely to run without masks and copies, see `merged_attention`."""
        has_kernel = self.cluster.is_gpu and self.compute_bytes < FLOAT32
        return has_kernel and self.step.packed and not (self.model.caps_scores or self.compiles)

    @property
    def ranks(self) -> int:
        return self.cluster.num_ranks

    @property
    def is_autocast(self) -> bool:
        """Whether each use of a float32 weight casts it to bfloat16."""
        is_mixed = self.precision == "bf16-mixed" and not self.computes_in_weights
        return is_mixed and not self.sharding.casts_shards

    @property
    def computes_in_weights(self) -> bool:
        """Whether the weights are loaded in bfloat16, so the precision does not matter."""
        return self.model.parameter_bytes < 3

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        is_16 = self.precision != "32-true" or self.computes_in_weights
        return BFLOAT16 if is_16 else FLOAT32

    @property
    def activation_bytes(self) -> float:
        """Bytes of an activation; under autocast norms and residuals are float32."""
        return 3 if self.is_autocast else self.compute_bytes

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a weight that is gathered from the ranks."""
        if self.sharding.casts_shards and self.precision == "bf16-mixed":
            return min(BFLOAT16, self.model.parameter_bytes)
        return self.model.parameter_bytes

    def share(self, is_divided: bool) -> int:
        """Return by how many ranks something is divided."""
        return self.ranks if is_divided else 1


def make_setup(
    outline: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    step: StepSizes,
    cluster: Cluster,
    *,
    strategy: Any = "auto",
    precision: object = "32-true",
    optimizer_bytes: float | None = None,
    with_reference: bool = False,
    refreshes_reference: bool = False,
    compiles: bool = False,
    **settings: object,
) -> Setup:
    """Return the setup of a model on the meta device.

    Args:
        make_optimizer: From the trained parameters.
        strategy: A name, or a strategy of Lightning.
        optimizer_bytes: State per trained parameter, instead of the optimizer's own.
        refreshes_reference: With an adapter, its reference is a second one.
        settings: Further fields of `Setup`.

    Raises:
        UserError: such a run would be refused, for its strategy, its precision, its head, or the
            type of the weights that its optimizer updates.
    """
    known = parse_precision(precision)
    kind, sharding = supported_strategy(strategy), sharding_of(strategy, cluster.num_ranks)
    if sharding.is_zero_3:
        refuse_layered_head(outline)
    made = build_optimizer(outline, make_optimizer)
    if made is not None:
        check_updates(made, kind, cluster.num_ranks)
    sizes, optimizer = sizes_of(outline), optimizer_sizes(outline, made)
    if optimizer_bytes is not None:
        size = round(optimizer_bytes * sizes.trained_parameters)
        optimizer = OptimizerSizes(state_bytes=size, copies=False)
    is_copied = refreshes_reference if sizes.has_adapter else with_reference
    return Setup(
        model=sizes,
        optimizer=optimizer,
        step=step,
        cluster=cluster,
        sharding=sharding,
        precision=known,
        reference_bytes=_reference_bytes(outline, sizes) if is_copied else 0,
        compiles=compiles,
        **settings,  # type: ignore[arg-type]
    )


def _reference_bytes(outline: nn.Module, sizes: ModelSizes) -> int:
    """Return the size of a second model or, with an adapter, of a second adapter."""
    if not sizes.has_adapter:
        return weight_bytes(outline)
    return sum(one.numel() * one.element_size() for one in trained(outline))


def parse_precision(precision: object) -> Precision:
    """Return the precision that a trainer's setting means.

    Raises:
        UserError: it cannot be trained with.
    """
    given = str(precision)
    if given not in PRECISIONS:
        refuse_precision(given)
    return PRECISIONS[given]
