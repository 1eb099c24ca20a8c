"""Trainings under DDP and sharded: `main` runs those that ``RANKS CASE/STRATEGY...`` names.

Each rank saves what it has of a run as ``CASE-STRATEGY-rankN.pt`` in the working directory.
With ``STRATEGY:FROM:STEPS`` it goes on from the checkpoints that ``FROM`` has left, to so many
steps, and with ``STRATEGY:FROM:STEPS:OPTIMIZER`` with one of `OTHER_OPTIMIZERS`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from ddp_trainings import fit_ranks
from lightning.pytorch.callbacks import Callback
from sharded_cases import (
    CASES,
    COMPILED,
    OBJECTIVES,
    OWN_ENGINE,
    REFUSED,
    RESUMED,
    SFT,
    SFT_PROMPTS,
    SKIPPING,
    CountSkipped,
)
from small_runs import PROMPTS, Keep, make_module
from tiny import LLAMA
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AttentionInterface
from worker_processes import wait_until

from lit_grpo.callbacks import Checkpoints
from lit_grpo.distributed.checkpoints import local_part
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.distributed.ranks import get_rank
from lit_grpo.policy import Policy
from lit_grpo.policy.files.model_files import copy_weights
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout import Sampling
from lit_grpo.rollout.hf import shared_prompts
from lit_grpo.rollout.hf.shared_prompts import SHARED, shared_attention
from lit_grpo.runs.final_model import FinalModel
from lit_grpo.training import Evaluation, GRPOModule, SFTModule
from lit_grpo.training.batching import micro_batches, rows_with_gradient
from lit_grpo.types import RolloutBatch, UserError

NUM_STEPS, NUM_COMPILED_STEPS = 5, 3
"""Rollout steps of a training run, and of one that is compared with a compiled one."""
TIMEOUT_MINUTES = 5
"""Within which one rank may compile while the other waits."""
COMPILED_AUTOGRAD = {f"compile lora/{one}" for one in ("fsdp2:ddp:3", "zero3", "zero3:zero3:3")}
"""Trainings that compile the backward pass, too. These strategies change the weights before it."""
TOKEN_BUDGET = 25
SHARED_TOKENS = 40
"""Tokens from which prompts are shared: those of the rank that has the longest of them."""


class OnlyLastMicroBatches(ZeROStrategy):
    """Let the engine take every micro-batch for the last one of a step."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        yield


def zero(stage, *, max_persistent=0, strategy=ZeROStrategy, **settings) -> ZeROStrategy:
    """Partition every parameter: by default small ones stay whole once they were gathered."""
    config = {
        "zero_optimization": {
            "stage3_param_persistence_threshold": max_persistent,
            "reduce_bucket_size": 20_000,
        }
    }
    return strategy(stage, config=config, timeout_minutes=TIMEOUT_MINUTES, **settings)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp2": lambda: FSDP2Strategy(timeout_minutes=TIMEOUT_MINUTES),
    "zero1": lambda: zero(1),
    "zero2": lambda: zero(2),
    "zero3": lambda: zero(3),
    "persistent": lambda: zero(3, max_persistent=10**5),
    "zero1 offloaded": lambda: zero(1, offload_optimizer=True),
    "zero2 offloaded": lambda: zero(2, offload_optimizer=True),
    "zero3 offloaded": lambda: zero(3, offload_optimizer=True, offload_parameters=True),
    **{f"zero{stage} one": partial(zero, stage) for stage in (1, 2, 3)},
    "zero2 only last": lambda: zero(2, strategy=OnlyLastMicroBatches),
    "background": lambda: FSDP2Strategy(timeout_minutes=TIMEOUT_MINUTES),
    "one": lambda: FSDP2Strategy(timeout_minutes=TIMEOUT_MINUTES),
    "whole": lambda: FSDP2Strategy(whole_gradients=True, timeout_minutes=TIMEOUT_MINUTES),
    "offloaded": lambda: FSDP2Strategy(cpu_offload=True, timeout_minutes=TIMEOUT_MINUTES),
    "kept": lambda: FSDP2Strategy(reshard_after_forward=False, timeout_minutes=TIMEOUT_MINUTES),
}
OTHER_OPTIMIZERS = {
    "RMSprop": torch.optim.RMSprop,
    "AMSGrad": partial(torch.optim.AdamW, amsgrad=True),  # which needs more than AdamW has kept
}


def trainer_settings(name: str, num_ranks: int) -> dict[str, Any]:
    strategy = STRATEGIES[name]()
    has_accelerator = getattr(strategy, "accelerator", None) is not None
    accelerator = "auto" if has_accelerator else "cpu"  # a trainer takes it from one place only
    return {"strategy": strategy, "devices": num_ranks, "accelerator": accelerator}


def new_module(
    *, update: Mapping[str, Any] | None = None, rewards: Any = None, **settings: Any
) -> GRPOModule:
    module = make_module(
        update={"max_tokens_per_micro_batch": TOKEN_BUDGET, "max_grad_norm": 1.0, **(update or {})},
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        rewards=rewards,
        **settings,
    )
    for reward in rewards or []:
        reward.module = module
    return module


def train(case: str, training: str, num_ranks: int) -> dict[str, Any]:
    settings = dict((CASES | OBJECTIVES | COMPILED | SKIPPING | OWN_ENGINE | REFUSED)[case])
    strategy, *earlier = training.split(":")
    of_trainer = trainer_settings(strategy, num_ranks)
    if "precision" in settings:
        of_trainer["precision"] = settings.pop("precision")
    callbacks = settings.pop("callbacks", [])
    module, keep = new_module(**settings), Keep()
    if len(earlier) > 2:
        module.make_optimizer = partial(OTHER_OPTIMIZERS[earlier[2]], lr=1e-3)
        module.allow_changes = True
    directory = f"{case}-{training}"
    in_background = strategy == "background"
    is_resumed = case in RESUMED or case in SKIPPING
    num_steps = NUM_COMPILED_STEPS if case in COMPILED else NUM_STEPS
    saving = Checkpoints(
        dirpath=directory,
        every_n_steps=2 if is_resumed or case in COMPILED else num_steps,
        keep_last=9,
        in_background=in_background,
    )
    seen = Seen(Path(directory) / "step_000002.ckpt")
    if in_background:
        write_later(seen)
    final = FinalModel(directory)
    trainer = fit_ranks(
        module,
        PROMPTS,
        4,
        keep,
        *callbacks,
        seen,
        saving,
        final,
        max_steps=(int(earlier[1]) if earlier else num_steps) * module.update.optimizer_steps,
        ckpt_path=f"{case}-{earlier[0]}/step_000002.ckpt" if earlier else None,
        trainer_settings=of_trainer,
    )
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "sent": copy_weights(
            module.policy.model, dtype=torch.bfloat16, is_writer=trainer.is_global_zero
        ),
        "is_written": seen.is_written,
        "shares_prompts": seen.shares_prompts,
        "num_tokens": [num_tokens(output["rollouts"]) for output in keep.outputs],
        "metrics": [output["metrics"] for output in keep.outputs],
        "num_micro_batches": [num_micro_batches(module, one["batch"]) for one in keep.outputs],
        "is_sharded": [
            hasattr(one, "placements") or hasattr(one, "ds_id")
            for one in module.policy.parameters()
        ],
        "num_optimizer_values": num_optimizer_values(module),
    }


def sft(case: str, strategy: str, num_ranks: int) -> dict[str, Any]:
    settings = dict(SFT[case])
    module = SFTModule(
        Policy(architecture=LLAMA),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        evaluation=Evaluation(before_training=False),
        sampling=Sampling(max_tokens=8),
    )
    final, callbacks = FinalModel(f"{case}-{strategy}"), settings.pop("callbacks", [])
    count = CountSkipped()
    fit_ranks(
        module,
        SFT_PROMPTS,
        4,
        *callbacks,
        count,
        final,
        max_steps=NUM_STEPS,
        trainer_settings=trainer_settings(strategy, num_ranks) | settings,
    )
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "num_skipped": count.found,
    }


def num_optimizer_values(module: GRPOModule) -> int:
    """Return how many values of the optimizer's state this rank has."""
    return sum(one.numel() for one in optimizer_values(module))


def optimizer_values(module: GRPOModule) -> list[torch.Tensor]:
    """Return this rank's parts of the tensors in the optimizer's state."""
    (optimizer,) = module.trainer.optimizers
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    found = (one for state in states for one in state.values() if torch.is_tensor(one))
    return [local_part(one) for one in found]


def num_tokens(rollouts: RolloutBatch) -> list[int]:
    """Return the number of tokens of each completion."""
    return [len(one.token_ids) for group in rollouts.groups for one in group.completions]


def count_shared_attention() -> list[Any]:
    """Return a list that grows with every call of the attention to prompts that rows share."""
    calls: list[Any] = []

    def attention(module: Any, *args: Any, **settings: Any) -> Any:
        calls.append(module.layer_idx)
        return shared_attention(module, *args, **settings)

    AttentionInterface.register(SHARED, attention)
    return calls


class Seen(Callback):
    """What is seen at each step.

    Args:
        first: The first checkpoint, of two steps.
    """

    def __init__(self, first: Path) -> None:
        self.is_written: list[bool] = []
        """Whether the first checkpoint was there as the step began."""
        self.shares_prompts: list[bool] = []
        self._first = first
        self._calls = count_shared_attention()

    def on_train_batch_start(self, *_: Any) -> None:
        self.is_written.append(self._first.exists())
        self._calls.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.shares_prompts.append(bool(self._calls))


def write_later(seen: Seen) -> None:
    """Let the checkpoints of the first two steps wait for the next step to begin."""
    write, numbers = FileSystemWriter.write_data, count(1)

    def write_then(self: FileSystemWriter, *arguments: Any) -> Any:
        number = min(next(numbers), 2)
        wait_until(lambda: len(seen.is_written) > number)
        return write(self, *arguments)

    FileSystemWriter.write_data = write_then


def num_micro_batches(module: GRPOModule, batch: Any) -> int:
    rows = rows_with_gradient(batch, module.objective)
    packed = module.policy.body_and_head.uses_packing
    return len(micro_batches(batch, rows, TOKEN_BUDGET, packed=packed))


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("error", ".*returned a view tensor")  # may drop gradients
    plain_compile = torch.compile
    shared_prompts.MIN_SAVED_TOKENS = SHARED_TOKENS
    for name in sys.argv[2:]:
        case, _, training = name.partition("/")
        torch.compiler.reset()  # each training builds its own programs
        # That code is generated rightly is no matter of a strategy, and takes minutes.
        backend = "aot_eager" if name in COMPILED_AUTOGRAD else "eager"
        torch.compile = partial(plain_compile, backend=backend)
        run = sft if case in SFT else train
        try:
            result = run(case, training, int(sys.argv[1]))
        except UserError as error:  # on every rank
            result = {"error": str(error)}
        torch.save(result, f"{case}-{training}-rank{get_rank()}.pt")
