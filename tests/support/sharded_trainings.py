"""Trainings under DDP and sharded: ``python sharded_trainings.py RANKS CASE/STRATEGY...``.

Each rank saves what it has of a training as ``CASE-STRATEGY-rankN.pt`` in the working directory.
With ``STRATEGY:FROM:STEPS`` it goes on from the checkpoints that ``FROM`` has left, to so many
steps.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from ddp_trainings import fit_ranks
from lightning.pytorch.callbacks import LambdaCallback
from small_runs import PROMPTS, Keep, ShareOfLowBytes, make_module
from tiny import LLAMA, prompt, tiny_policy
from torch.distributed.checkpoint import FileSystemWriter

from lit_grpo.callbacks import Checkpoints
from lit_grpo.distributed import get_rank
from lit_grpo.distributed.checkpoints import local_part
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.objective import EntropyTerm, KLTerm, Objective
from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.model_files import save_model
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout import Sampling
from lit_grpo.runs.files import FinalModel
from lit_grpo.runs.rollback import roll_back
from lit_grpo.training import Evaluation, GRPOModule, SFTModule
from lit_grpo.training.batching import micro_batches, rows_with_gradient
from lit_grpo.types import UserError

NUM_STEPS = 5
TOKEN_BUDGET = 25


class NoRewardOnRank1(ShareOfLowBytes):
    """Fail on all rows of the second rank at the second step."""

    def score(self, prompt, completion):
        if get_rank() == 1 and self.module.rollout_step == 1:
            raise ConnectionError("lost")
        return super().score(prompt, completion)


class SpoilGradient(L.Callback):
    """Let the second rank have no finite gradient in the second batch."""

    def on_train_start(self, trainer, pl_module):
        parameter = pl_module.policy.trainable_parameters()[0]
        parameter.register_hook(lambda gradient: gradient * self.factor(trainer))

    def factor(self, trainer) -> float:
        is_spoiled = get_rank() == 1 and trainer.fit_loop.total_batch_idx == 1
        return float("nan") if is_spoiled else 1.0


class CountSkipped(L.Callback):
    """Keep the number of skipped steps in a row after every batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.found.append(pl_module.skipped_steps.in_a_row)


class RollBack(L.Callback):
    """Go back to the checkpoint of the second step after the third one."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if pl_module.rollout_step == 3 and not pl_module.num_rollbacks:
            assert roll_back(trainer, pl_module, 3) is not None


MOVING = KLTerm(coef=0.1, refresh_every=2, refresh_mix=0.5)
LORA = {"lora": LoRA(rank=4)}
UPDATES = {"epochs": 2, "minibatches": 2}
TIED = LLAMA | {"tie_word_embeddings": True}


def write_policies() -> None:
    """Write the policies, in several files each, if they are not there."""
    for name, architecture in SAVED.items():
        if not Path(name).exists():
            policy = tiny_policy(architecture=architecture, seed=7)
            save_model(policy.model, name, shard_bytes=20_000)
            policy.tokenizer.save_pretrained(name)


def from_files(name: str) -> dict[str, Any]:
    return {"path": name, "architecture": None}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"policy": {"architecture": TIED}},
    "padded": {"policy": {"packing": False}},
    "checkpointing": {"policy": {"gradient_checkpointing": True}},
    "compile": {"policy": {"compile": True}},
    "reference": {"objective": Objective(kl=KLTerm(coef=0.1))},
    "moving reference": {"objective": Objective(kl=MOVING)},
    "reference in the reward": {"objective": Objective(kl=KLTerm(coef=0.1, place="reward"))},
    "lora": {"policy": LORA},
    "lora with a reference": {"policy": LORA, "objective": Objective(kl=KLTerm(coef=0.1))},
    "lora with a moving reference": {
        "policy": LORA,
        "objective": Objective(kl=KLTerm(coef=0.1, refresh_every=2)),
    },
    "several updates": {"update": UPDATES},
    "entropy": {
        "objective": Objective(entropy=EntropyTerm(coef=0.01), top_entropy_fraction=0.5),
    },
    "a rank without rewards": {"rewards": [NoRewardOnRank1()]},
    "files": {
        "policy": {"path": "untied", "architecture": None},
        "objective": Objective(kl=KLTerm(coef=0.1)),
    },
    "files, tied": {"policy": {"path": "tied", "architecture": None}},
    "files, lora": {"policy": {"path": "untied", "architecture": None} | LORA},
    "bf16-mixed": {"precision": "bf16-mixed"},
}
SAVED = {"untied": LLAMA, "tied": TIED}
"""Policies whose weights are in files of the working directory."""
SKIPPING = {
    "not finite": {"callbacks": [SpoilGradient()]},
    "rolled back": {"callbacks": [RollBack()]},
}
SFT: dict[str, dict[str, Any]] = {
    "sft": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "sft not finite": {"callbacks": [SpoilGradient()]},
}
SFT_PROMPTS = [prompt(f"{n}+{n}=", id=str(n), answer=str(2 * n) * (n + 1)) for n in range(6)]


def zero(stage, *, max_persistent=0, **settings) -> ZeROStrategy:
    """Partition every parameter: by default small ones stay whole once they were gathered."""
    config = {
        "zero_optimization": {
            "stage3_param_persistence_threshold": max_persistent,
            "reduce_bucket_size": 20_000,
        }
    }
    return ZeROStrategy(stage, config=config, timeout_minutes=1, **settings)


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp2": lambda: FSDP2Strategy(timeout_minutes=1),
    "zero1": lambda: zero(1),
    "zero2": lambda: zero(2),
    "zero3": lambda: zero(3),
    "persistent": lambda: zero(3, max_persistent=10**5),
    "zero2 offloaded": lambda: zero(2, offload_optimizer=True),
    "zero3 offloaded": lambda: zero(3, offload_optimizer=True, offload_parameters=True),
    "background": lambda: FSDP2Strategy(timeout_minutes=1),
    "one": lambda: FSDP2Strategy(timeout_minutes=1),
    "whole": lambda: FSDP2Strategy(whole_gradients=True, timeout_minutes=1),
    "kept": lambda: FSDP2Strategy(reshard_after_forward=False, timeout_minutes=1),
}


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
    settings, (strategy, *earlier) = dict((CASES | SKIPPING)[case]), training.split(":")
    trainer_settings = {"strategy": STRATEGIES[strategy](), "devices": num_ranks}
    if "precision" in settings:
        trainer_settings["precision"] = settings.pop("precision")
    callbacks = settings.pop("callbacks", [])
    module, keep = new_module(**settings), Keep()
    directory = f"{case}-{training}"
    in_background, is_written = strategy == "background", []
    if in_background:
        write_slowly()
    saving = Checkpoints(
        dirpath=directory, every_n_steps=2, keep_last=9, in_background=in_background
    )
    first = Path(directory) / "step_000002.ckpt"
    seeing = LambdaCallback(on_train_batch_start=lambda *_: is_written.append(first.exists()))
    final = FinalModel(directory)
    fit_ranks(
        module,
        PROMPTS,
        4,
        keep,
        *callbacks,
        seeing,
        saving,
        final,
        max_steps=(int(earlier[1]) if earlier else NUM_STEPS) * module.update.optimizer_steps,
        ckpt_path=f"{case}-{earlier[0]}/step_000002.ckpt" if earlier else None,
        trainer_settings=trainer_settings,
    )
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "is_written": is_written,
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
        trainer_settings={"strategy": STRATEGIES[strategy](), "devices": num_ranks, **settings},
    )
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "num_skipped": count.found,
    }


def num_optimizer_values(module: GRPOModule) -> int:
    """Return how many values of the optimizer's state this rank has."""
    (optimizer,) = module.trainer.optimizers
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    found = (one for state in states for one in state.values() if torch.is_tensor(one))
    return sum(local_part(one).numel() for one in found)


def write_slowly() -> None:
    """Begin to write a checkpoint half a second later, so that steps are taken meanwhile."""
    write = FileSystemWriter.write_data

    def write_later(self: FileSystemWriter, *arguments: Any) -> Any:
        time.sleep(0.5)
        return write(self, *arguments)

    FileSystemWriter.write_data = write_later


def num_micro_batches(module: GRPOModule, batch: Any) -> int:
    rows = rows_with_gradient(batch, module.objective)
    packed = module.policy.causal_model.uses_packing
    return len(micro_batches(batch, rows, TOKEN_BUDGET, packed=packed))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    if "LOCAL_RANK" not in os.environ:  # the first rank, before it starts the others
        write_policies()
    for name in sys.argv[2:]:
        case, _, training = name.partition("/")
        run = sft if case in SFT else train
        try:
            result = run(case, training, int(sys.argv[1]))
        except UserError as error:  # on every rank
            result = {"error": str(error)}
        torch.save(result, f"{case}-{training}-rank{get_rank()}.pt")
