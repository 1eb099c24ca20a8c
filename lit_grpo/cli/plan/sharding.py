"""What each strategy divides by the ranks, and what it keeps besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_grpo.types import setting_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A strategy, by what it divides by the ranks; everything else is on each of them."""

    name: str
    weights: bool = False
    """With the reference; a layer is gathered when it is needed."""
    gradients: bool = False
    optimizer: bool = False
    copies_gradients: bool = False
    """Whether gradients are copied into buckets, as DDP does unless told otherwise."""
    own_masters: bool = False
    """Whether the strategy keeps float32 weights of its own for the optimizer, as DeepSpeed."""
    casts_shards: bool = False
    """Whether ``bf16-mixed`` gathers float32 shards as bfloat16, in place of autocast."""
    reduces_each: bool = False
    """Whether every micro-batch's gradient is reduced, not only that of an optimizer step."""


SINGLE = Sharding(name="single")
SHARDINGS = {
    one.name: one
    for one in (
        SINGLE,
        Sharding(name="ddp", copies_gradients=True),
        Sharding(
            name="fsdp2",
            weights=True,
            gradients=True,
            optimizer=True,
            casts_shards=True,
            reduces_each=True,
        ),
        Sharding(name="deepspeed_stage_1", optimizer=True, own_masters=True),
        Sharding(
            name="deepspeed_stage_2",
            gradients=True,
            optimizer=True,
            own_masters=True,
            reduces_each=True,
        ),
        Sharding(
            name="deepspeed_stage_3",
            weights=True,
            gradients=True,
            optimizer=True,
            own_masters=True,
            reduces_each=True,
        ),
    )
}
"""Name -> strategy, as in ``trainer.strategy``."""


def sharding_of(strategy: Any, num_ranks: int) -> Sharding:
    """Return what a strategy divides, given its name or a strategy of Lightning.

    One rank divides nothing, but DeepSpeed keeps its own float32 weights all the same.

    Raises:
        UserError: nothing is known of it.
    """
    name = strategy if isinstance(strategy, str) else _name_of(strategy)
    if name in ("auto", "single") or name.startswith("single_device"):
        return SHARDINGS["ddp"] if num_ranks > 1 else SINGLE
    if name.startswith("ddp"):
        return SHARDINGS["ddp"]
    if name in ("deepspeed", "fsdp"):
        name = {"deepspeed": "deepspeed_stage_2", "fsdp": "fsdp2"}[name]
    if name not in SHARDINGS:
        raise setting_error(
            "trainer.strategy",
            f"one of auto, {', '.join(SHARDINGS)}",
            repr(name),
            "what others divide by the ranks is not known",
        )
    return SHARDINGS[name]


def _name_of(strategy: Any) -> str:
    """Return the name of the strategy that an object of Lightning is."""
    kinds = {one.__name__ for one in type(strategy).__mro__}
    if "DeepSpeedStrategy" in kinds:
        stage = strategy.config["zero_optimization"]["stage"]
        return f"deepspeed_stage_{stage}"
    if kinds & {"ModelParallelStrategy", "FSDPStrategy"}:
        return "fsdp2"
    if "DDPStrategy" in kinds:
        return "ddp"
    return "auto" if "SingleDeviceStrategy" in kinds else type(strategy).__name__
