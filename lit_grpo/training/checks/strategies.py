"""Refuse strategies, precisions and optimizers that would train wrongly without an error."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import torch
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
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.policy import Policy
from lit_grpo.training.optimizer.master_weights import MasterAdamW
from lit_grpo.types import UserError, setting_error

log = logging.getLogger(__name__)

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
_OF_NVME = (
    "a name cannot say where the disk is; use deepspeed_stage_3_offload, which offloads to host "
    "memory, or ZeROStrategy with nvme and nvme_path in its config"
)
_OF_COPIES = (
    "its ranks are copies of a process, by spawn or fork, which cannot share its files and leave "
    "it without a result; use ddp in a script, which starts the command once for each rank"
)
_OF_NAMES = "no strategy has this name; use ddp for several GPUs, fsdp2 to divide a model over them"
_OF_OTHERS = "nobody has checked that it keeps gradients and weights complete; use ddp or fsdp2"


def refuse_unsupported(trainer: L.Trainer) -> None:
    """Refuse strategies and precisions that would train wrongly without an error.

    Raises:
        UserError: `supported_strategy` or `refuse_precision` does not know them.
    """
    supported_strategy(trainer.strategy)
    refuse_precision(trainer.precision)


def supported_strategy(strategy: str | Strategy) -> type[Strategy]:
    """Return the class of a strategy, an object or a name as in ``trainer.strategy``.

    A name is looked up and nothing is made of it, so that its packages need not be installed.

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
        return _OF_NAMES
    if isinstance(strategy, str) and strategy.endswith("_nvme"):
        return _OF_NVME
    if issubclass(kind, (FSDP2Strategy, ZeROStrategy)):
        return ""
    for refused, why in _WHY_REFUSED:
        if issubclass(kind, refused):
            return why
    if issubclass(kind, DDPStrategy) and start_method not in (None, "popen"):
        return _OF_COPIES
    return "" if issubclass(kind, (SingleDeviceStrategy, DDPStrategy)) else _OF_OTHERS


def refuse_precision(precision: str) -> None:
    """Refuse a precision other than those that were tested.

    Raises:
        UserError: it is neither ``32-true`` nor ``bf16-mixed``.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise setting_error(
            "trainer.precision",
            "32-true or bf16-mixed",
            precision,
            "others are untested; for bfloat16 weights set model.policy.dtype to bfloat16, and "
            "model.optimizer to MasterAdamW, which keeps the small updates that they lose",
        )


def is_zero_3(strategy: Strategy) -> bool:
    """Return whether a strategy is stage 3 of DeepSpeed."""
    return isinstance(strategy, ZeROStrategy) and strategy.stage == 3


def refuse_compiled(*, compiles: bool, is_zero_3: bool) -> None:
    """Refuse ``policy.compile`` where its programs would take in the gathering of weights.

    Raises:
        UserError: the policy is compiled, and stage 3 of DeepSpeed partitions its weights.
    """
    if compiles and is_zero_3:
        raise setting_error(
            "model.policy.compile",
            "false in stage 3 of DeepSpeed",
            compiles,
            "torch.compile traces the hooks that gather weights, and ranks wait for each other "
            "until the timeout; trainer.strategy fsdp2 divides the weights of a compiled policy",
        )


def warn_of_casts(policy: Policy, trainer: L.Trainer, *, samples_with_policy: bool) -> None:
    """Warn of a frozen base that is cast again for every sampled token.

    Autocast keeps the casts of trained weights only. FSDP2 gathers the weights in bfloat16.
    """
    is_frozen_float32 = policy.lora is not None and policy.dtype == "float32"
    is_cast = trainer.precision == "bf16-mixed" and not isinstance(trainer.strategy, FSDP2Strategy)
    if samples_with_policy and is_frozen_float32 and is_cast:
        rank_zero_only(log.warning)(
            "the frozen weights under the adapter are float32, and with trainer.precision "
            "bf16-mixed they are cast to bfloat16 again for every sampled token, which takes "
            "longer than sampling it. Set model.policy.dtype to bfloat16: the adapter stays "
            "float32."
        )


def check_updates(optimizer: Optimizer, strategy: type[Strategy], world_size: int) -> None:
    """Check how an optimizer updates bfloat16 weights; float32 weights suit every one.

    Raises:
        UserError: it would do it wrongly under the strategy, or with several ranks.
    """
    weights = [one for group in optimizer.param_groups for one in group["params"]]
    if all(one.dtype == torch.float32 for one in weights):
        return
    if issubclass(strategy, ZeROStrategy):
        raise setting_error(
            "model.policy.dtype",
            "float32 under DeepSpeed, or a frozen base under LoRA",
            "bfloat16",
            "for bfloat16 compute set trainer.precision to bf16-mixed",
        )
    keeps_masters = isinstance(optimizer, MasterAdamW)
    # The attribute of the optimizers of torchao.
    rounds_at_random = getattr(optimizer, "bf16_stochastic_round", False)
    if issubclass(strategy, FSDP2Strategy) and (keeps_masters or rounds_at_random):
        raise setting_error(
            "model.policy.dtype",
            f"float32 with trainer.strategy fsdp2 and {type(optimizer).__name__}",
            "bfloat16",
            "with trainer.precision bf16-mixed shards stay float32, which need no other masters, "
            "and are gathered in bfloat16",
        )
    if rounds_at_random and world_size > 1:
        raise UserError(
            f"bf16_stochastic_round must be false on several processes, got true on {world_size} "
            "(each would round the same weights in its own way, and the ranks' weights would "
            "diverge). Set model.optimizer to MasterAdamW, or trainer.strategy to fsdp2 with "
            "model.policy.dtype float32."
        )
    if not keeps_masters and not rounds_at_random:
        _warn_of_lost_updates(type(optimizer).__name__)


@rank_zero_only
def _warn_of_lost_updates(optimizer: str) -> None:
    log.warning(
        "%s trains bfloat16 weights (model.policy.dtype), which lose changes below 1/512 of a "
        "weight: at a learning rate of 1e-6 nearly all. Set model.optimizer to MasterAdamW, which "
        "keeps float32 weights of its own; or to torchao.optim.AdamW8bit with init_args "
        "{bf16_stochastic_round: true}; or model.policy.dtype to float32 with trainer.precision "
        "bf16-mixed. Leave it if the optimizer keeps the changes in its own way.",
        optimizer,
    )
