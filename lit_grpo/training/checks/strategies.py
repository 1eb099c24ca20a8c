"""Refuse strategies, precisions and optimizers that would train wrongly without an error."""

from __future__ import annotations

import logging

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.distributed.supported import supported_strategy
from lit_grpo.policy import Policy
from lit_grpo.training.optimizer.master_weights import MasterAdamW
from lit_grpo.types import UserError, setting_error

log = logging.getLogger(__name__)

PRECISIONS = ("32-true", "bf16-mixed")
"""The precisions that were tested, by Lightning's names."""


def refuse_unsupported(trainer: L.Trainer) -> None:
    """Refuse strategies and precisions that would train wrongly without an error.

    Raises:
        UserError: `supported_strategy` or `refuse_precision` does not know them.
    """
    supported_strategy(trainer.strategy)
    refuse_precision(trainer.precision)


def refuse_precision(precision: str) -> None:
    """Refuse a precision other than those that were tested.

    Raises:
        UserError: it is none of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise setting_error(
            "trainer.precision",
            " or ".join(PRECISIONS),
            precision,
            "others are untested; for bfloat16 weights set model.policy.dtype to bfloat16, and "
            "model.optimizer to MasterAdamW, which keeps the small updates that they lose",
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
    """Check that an optimizer can update its weights, and how it updates those in bfloat16.

    Raises:
        UserError: it cannot, or would update them wrongly, under the strategy or on several ranks.
    """
    kinds = type(optimizer).__mro__
    is_of_bitsandbytes = any(one.__module__.startswith("bitsandbytes.") for one in kinds)
    if is_of_bitsandbytes and issubclass(strategy, FSDP2Strategy):
        raise setting_error(
            "model.optimizer",
            "another one with trainer.strategy fsdp2, such as torchao.optim.AdamW8bit",
            f"{type(optimizer).__name__} of bitsandbytes",
            "its kernels do not take sharded weights",
        )
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
