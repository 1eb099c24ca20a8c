"""Which strategies train here, and why the others are refused."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.types import setting_error

_SUPPORTED = "auto, ddp, fsdp2 or deepspeed_stage_1, _2, _3, _2_offload or _3_offload"
_IS_FOR_TPUS = "it is for TPUs, on which nothing here has run; use auto with a GPU or a CPU"
_WHY_REFUSED: tuple[tuple[type[Strategy], str], ...] = (
    (
        FSDPStrategy,
        "Lightning's FSDP gathers weights for one pass of a step, while a step here samples and "
        "has several, so it would lose gradients; use fsdp2, which divides the same",
    ),
    (
        ModelParallelStrategy,
        "it leaves it to the module to divide the model, and tensor parallelism of the trainer is "
        "not supported; use fsdp2, which divides weights, gradients and optimizer state",
    ),
    (SingleDeviceXLAStrategy, _IS_FOR_TPUS),
    (XLAStrategy, _IS_FOR_TPUS),
    (
        DeepSpeedStrategy,
        "Lightning's own DeepSpeed calls its engine once a step, while a step here has several "
        "passes, so it would lose gradients; use one of these stages, or the class ZeROStrategy",
    ),
)
"""Class of Lightning -> why it is refused, and what to use; the first that fits counts."""
_WHY_NOT_NVME = (
    "a name cannot say where the disk is; use deepspeed_stage_3_offload, which offloads to host "
    "memory, or ZeROStrategy with nvme and nvme_path in its config"
)
_WHY_NOT_COPIES = (
    "its ranks are copies of a process, by spawn or fork, which cannot share its files and leave "
    "it without a result; use ddp in a script, which starts the command once for each rank"
)
_UNKNOWN_NAME = (
    "no strategy has this name; use ddp for several GPUs, fsdp2 to divide a model over them"
)
_UNTESTED = "nobody has checked that it keeps gradients and weights complete; use ddp or fsdp2"


_NAMED: tuple[type[Strategy], ...] = (FSDP2Strategy, ZeROStrategy, DDPStrategy, *dict(_WHY_REFUSED))
_CLASSES = {kind.__name__: kind for kind in _NAMED}


def supported_strategy(strategy: str | Strategy) -> type[Strategy]:
    """Return the class of a strategy, an object or a name as in ``trainer.strategy``.

    A name is looked up and nothing is made of it, so its packages need not be installed.

    Raises:
        UserError: the strategy is neither ``auto`` on one device nor ``ddp``, ``fsdp2`` or one of
            ``deepspeed_stage_…``.
    """
    kind: type = type(strategy)
    start_method: str | None = getattr(strategy, "_start_method", None)
    if isinstance(strategy, str):
        entry: dict[str, Any] = dict(StrategyRegistry.items()).get(strategy, {})
        kind = entry.get("strategy", SingleDeviceStrategy if strategy == "auto" else str)
        start_method = entry.get("init_params", {}).get("start_method")
    if why := _why_refused(kind, strategy, start_method):
        value = strategy if isinstance(strategy, str) else kind.__name__
        raise setting_error("trainer.strategy", _SUPPORTED, value, why)
    return kind


def _why_refused(kind: type, strategy: str | Strategy, start_method: str | None) -> str:
    """Return why a strategy of this class is refused, and what to use; nothing if it is not."""
    if kind is str:
        named = _CLASSES.get(str(strategy).rpartition(".")[2])
        return _UNKNOWN_NAME if named is None else _of_class(named)
    if isinstance(strategy, str) and strategy.endswith("_nvme"):
        return _WHY_NOT_NVME
    if issubclass(kind, (FSDP2Strategy, ZeROStrategy)):
        return ""
    for refused, why in _WHY_REFUSED:
        if issubclass(kind, refused):
            return why
    if issubclass(kind, DDPStrategy) and start_method not in (None, "popen"):
        return _WHY_NOT_COPIES
    return "" if issubclass(kind, (SingleDeviceStrategy, DDPStrategy)) else _UNTESTED


def _of_class(kind: type[Strategy]) -> str:
    """Return how to name a class given as a strategy, or why it is refused."""
    return _why_refused(kind, kind.__name__, None) or (
        f"a class needs class_path: {kind.__module__}.{kind.__qualname__}; in Python, pass "
        f"{kind.__name__}(…)"
    )
