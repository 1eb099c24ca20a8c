"""Strategies, precisions and optimizers with which a run would be wrong."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from tiny import LLAMA
from torch.optim import SGD

from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.policy import LoRA, Policy
from lit_grpo.training.checks.strategies import (
    check_updates,
    refuse_unsupported,
    warn_of_casts,
)
from lit_grpo.training.optimizer.master_weights import MasterAdamW
from lit_grpo.types import UserError


def _xla():
    strategy = object.__new__(XLAStrategy)
    strategy._start_method = "fork"  # as its constructor sets it
    return strategy


@pytest.mark.parametrize(
    ("strategy", "precision", "message"),
    [
        (SingleDeviceStrategy, "64-true", "got 64-true .* Set trainer.precision"),
        (SingleDeviceStrategy, "bf16-true", "policy.dtype to bfloat16, and .* MasterAdamW"),
        (FSDPStrategy, "32-true", "got FSDPStrategy .* Set trainer.strategy"),
        (ModelParallelStrategy, "32-true", "got ModelParallelStrategy .* Set trainer.strategy"),
        (partial(DDPStrategy, start_method="fork"), "32-true", "got DDPStrategy .*spawn or fork"),
        # Without its constructor, which needs the package.
        (
            lambda: object.__new__(DeepSpeedStrategy),
            "32-true",
            "deepspeed_stage_1, _2, .* got DeepSpeedStrategy .* Set trainer.strategy",
        ),
        (_xla, "32-true", r"got XLAStrategy \(it is for TPUs.* trainer.strategy"),
    ],
)
def test_strategies_and_precisions_that_would_train_wrongly_are_refused(
    strategy, precision, message
):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(SimpleNamespace(strategy=strategy(), precision=precision))


class AtRandom(SGD):
    bf16_stochastic_round = True


@pytest.mark.parametrize(
    ("optimizer", "world_size", "strategy", "message"),
    [
        (MasterAdamW, 2, DDPStrategy, ""),
        (MasterAdamW, 2, FSDP2Strategy, "dtype must be float32 with .* fsdp2 and MasterAdamW"),
        (MasterAdamW, 2, ZeROStrategy, "dtype must be float32 under DeepSpeed"),
        (AtRandom, 1, SingleDeviceStrategy, ""),
        (AtRandom, 2, DDPStrategy, "stochastic_round must be false .* true on 2 .* MasterAdamW"),
        (AtRandom, 2, FSDP2Strategy, "dtype must be float32 with .* fsdp2 and AtRandom"),
        (SGD, 1, ZeROStrategy, "dtype must be float32 under DeepSpeed"),
    ],
)
def test_optimizers_that_would_let_bfloat16_ranks_part_are_refused(
    optimizer, world_size, strategy, message, caplog
):
    for dtype in (torch.float32, torch.bfloat16):
        made = optimizer([torch.nn.Parameter(torch.ones(2, dtype=dtype))], lr=1.0)
        if message and dtype == torch.bfloat16:
            with pytest.raises(UserError, match=message):
                check_updates(made, strategy, world_size)
        else:
            check_updates(made, strategy, world_size)
    assert not caplog.messages


def test_the_kernels_of_bitsandbytes_take_no_sharded_weights():
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})
    optimizer = type("Mine", (kind,), {})([torch.nn.Parameter(torch.zeros(1))])
    check_updates(optimizer, DDPStrategy, 2)
    with pytest.raises(UserError, match=r"such as torchao\.optim\.AdamW8bit, got Mine of bitsandb"):
        check_updates(optimizer, FSDP2Strategy, 2)


LORA_IN_FLOAT32 = {"lora": LoRA(rank=4), "dtype": "float32"}


@pytest.mark.parametrize(
    ("settings", "precision", "strategy", "samples_with_policy", "warns"),
    [
        (LORA_IN_FLOAT32, "bf16-mixed", SingleDeviceStrategy, True, True),
        (LORA_IN_FLOAT32, "32-true", SingleDeviceStrategy, True, False),
        (LORA_IN_FLOAT32, "bf16-mixed", FSDP2Strategy, True, False),
        (LORA_IN_FLOAT32, "bf16-mixed", SingleDeviceStrategy, False, False),
        (LORA_IN_FLOAT32 | {"dtype": "bfloat16"}, "bf16-mixed", SingleDeviceStrategy, True, False),
        ({"dtype": "float32"}, "bf16-mixed", SingleDeviceStrategy, True, False),
    ],
)
def test_a_frozen_base_that_is_cast_for_every_token_is_warned_of(
    settings, precision, strategy, samples_with_policy, warns, caplog
):
    policy = Policy(architecture=LLAMA, **settings)
    trainer = SimpleNamespace(strategy=strategy(), precision=precision)
    warn_of_casts(policy, trainer, samples_with_policy=samples_with_policy)
    assert ("Set model.policy.dtype to bfloat16" in caplog.text) == warns
