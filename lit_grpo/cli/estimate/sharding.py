"""Describe what each strategy divides over the ranks, and what else it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.distributed.supported import supported_strategy

BUCKET_VALUES = 500_000_000
"""Values of a bucket of DeepSpeed (``reduce_bucket_size``)."""
STEP_VALUES = 1_000_000_000
"""Values with which stage 3 of DeepSpeed takes a step at a time (``sub_group_size``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParts:
    """A strategy, by what it divides by the ranks; everything else is on each of them."""

    name: str
    weights: bool = False
    """With the reference; a layer is gathered when it is needed."""
    gradients: bool = False
    optimizer: bool = False
    copies_gradients: bool = False
    """Whether gradients are copied into buckets, as DDP does unless told otherwise."""
    copies_weights: bool = False
    """Whether the optimizer updates a copy of the weights, like DeepSpeed's."""
    sums_apart: bool = False
    """Whether a micro-batch's gradients are reduced apart from the sum of earlier ones, as in
    DeepSpeed's stage 2."""
    casts_shards: bool = False
    """Whether ``bf16-mixed`` gathers float32 shards as bfloat16, instead of using autocast."""
    keeps_layers: bool = False
    """Whether a gathered layer stays whole until its backward pass is over."""
    bucket_values: int = 0
    """Values of a bucket of gradients of DeepSpeed; 0 under other strategies."""
    step_values: int | None = None
    """Values of a rank's part with which the optimizer takes a step at a time; None for all."""
    offloads_weights: bool = False
    """Whether a rank has its part of the weights in host memory."""
    offloads_optimizer: bool = False
    """The same for gradients and the optimizer's state."""

    @property
    def is_deepspeed(self) -> bool:
        return self.bucket_values > 0

    @property
    def is_zero_3(self) -> bool:
        """Whether it is DeepSpeed's stage 3."""
        return self.is_deepspeed and self.weights


SINGLE = ShardedParts(name="single")
_FSDP2 = ShardedParts(name="fsdp2", weights=True, gradients=True, optimizer=True, casts_shards=True)
_STAGE_1 = ShardedParts(
    name="deepspeed_stage_1", optimizer=True, copies_weights=True, bucket_values=BUCKET_VALUES
)
_STAGE_2 = replace(_STAGE_1, name="deepspeed_stage_2", gradients=True, sums_apart=True)
_STAGE_3 = replace(
    _STAGE_1,
    name="deepspeed_stage_3",
    weights=True,
    gradients=True,
    step_values=STEP_VALUES,
)
SHARDINGS = {
    one.name: one
    for one in (
        SINGLE,
        ShardedParts(name="ddp", copies_gradients=True),
        _FSDP2,
        _STAGE_1,
        _STAGE_2,
        _STAGE_3,
    )
}
"""Name -> strategy with its defaults."""


def sharding_of(strategy: Any, num_ranks: int) -> ShardedParts:
    """Return what a strategy divides, given its name or a strategy of Lightning.

    One rank divides nothing, but DeepSpeed copies its weights all the same.

    Raises:
        UserError: the strategy cannot be trained with.
    """
    kind = supported_strategy(strategy)
    if issubclass(kind, FSDP2Strategy):
        return _FSDP2 if isinstance(strategy, str) else _fsdp2(strategy)
    if issubclass(kind, ZeROStrategy):
        return _zero(_zero_settings(strategy))
    if issubclass(kind, DDPStrategy) or num_ranks > 1:
        return _ddp(strategy)
    return SINGLE


def _ddp(strategy: Any) -> ShardedParts:
    settings: Mapping[str, Any] = getattr(strategy, "_ddp_kwargs", {})
    shares = bool(settings.get("gradient_as_bucket_view"))
    return replace(SHARDINGS["ddp"], copies_gradients=not shares)


def _fsdp2(strategy: FSDP2Strategy) -> ShardedParts:
    return replace(
        _FSDP2,
        gradients=not strategy.whole_gradients,
        keeps_layers=not strategy.reshard_after_forward,
        offloads_weights=strategy.cpu_offload,
        offloads_optimizer=strategy.cpu_offload,
    )


def _zero(settings: Mapping[str, Any]) -> ShardedParts:
    sharding = SHARDINGS[f"deepspeed_stage_{settings['stage']}"]
    if sharding.step_values is not None:
        size = settings.get("sub_group_size", STEP_VALUES)
        sharding = replace(sharding, step_values=int(size))
    return replace(
        sharding,
        bucket_values=int(settings.get("reduce_bucket_size", BUCKET_VALUES)),
        offloads_weights="offload_param" in settings,
        offloads_optimizer="offload_optimizer" in settings,
    )


def _zero_settings(strategy: Any) -> Mapping[str, Any]:
    """Return ``zero_optimization`` of DeepSpeed's settings."""
    if not isinstance(strategy, str):
        settings: Mapping[str, Any] = strategy.config["zero_optimization"]
        return settings
    given: Mapping[str, Any] = StrategyRegistry[strategy]["init_params"]
    names = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
    return {"stage": given["stage"]} | {names[key]: {} for key in names if given.get(key)}
