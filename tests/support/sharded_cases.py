"""What is trained under every strategy: policies, objectives, and what goes wrong."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import lightning as L
import torch
from small_runs import ShareOfLowBytes
from tiny import LLAMA, perturbed, prompt, tiny_policy
from weight_policies import MIXTRAL

from lit_grpo.distributed.ranks import get_rank
from lit_grpo.objective import (
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    Objective,
)
from lit_grpo.policy import LoRA
from lit_grpo.policy.files.model_files import save_model
from lit_grpo.rollout import RolloutEngine
from lit_grpo.runs.checkpoints.rollback import roll_back
from lit_grpo.types import Completion


class NoRewardOnRank1(ShareOfLowBytes):
    """Fail on all rows of the second rank at the second step."""

    def score(self, prompt, completion):
        if get_rank() == 1 and self.module.rollout_step == 1:
            raise ConnectionError("lost")
        return super().score(prompt, completion)


class StopsEarly(RolloutEngine):
    """Run the policy's model until every completion has ended, which ranks do at unlike lengths."""

    def load_weights(self, policy, version):
        self.policy = policy

    @torch.no_grad()
    def generate(self, prompts, group_size, sampling, *, seed):
        generator = torch.Generator().manual_seed(seed)
        for row in range(len(prompts) * group_size):
            tokens, logprobs = list(prompts[row // group_size].token_ids), []
            while len(logprobs) < 1 + row % 4 + get_rank():
                logits = self.policy.model(input_ids=torch.tensor([tokens])).logits[0, -1]
                scores = logits.float().log_softmax(-1)
                token = int(torch.multinomial(scores.exp(), 1, generator=generator))
                tokens.append(token)
                logprobs.append(float(scores[token]))
            sampled = tuple(tokens[-len(logprobs) :])
            yield (
                row,
                Completion(
                    token_ids=sampled,
                    sampler_logprobs=tuple(logprobs),
                    text="",
                    finish_reason="stop",
                ),
            )


class Declared(StopsEarly):
    """`StopsEarly`, which declares that it samples with the policy's own model."""

    samples_with_policy = True


class SpoilGradient(L.Callback):
    """Let the second rank have no finite gradient in the second batch.

    Autograd does not compute the gradients of shards, so that a hook on those would do nothing.
    """

    def on_train_start(self, trainer, pl_module):
        def watch(module: Any, inputs: Any, embedded: torch.Tensor) -> None:
            if embedded.requires_grad:
                embedded.register_hook(lambda gradient: gradient * self.factor(trainer))

        pl_module.policy.model.get_input_embeddings().register_forward_hook(watch)

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


TEACHER = "teacher"
MOVING = KLTerm(coef=0.1, refresh_every=2, refresh_mix=0.5)
LORA = {"lora": LoRA(rank=4)}
UPDATES = {"epochs": 2, "minibatches": 2}
FROM_FILES = {"path": "untied", "architecture": None}
TIED = LLAMA | {"tie_word_embeddings": True}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded, entropy": {
        "policy": {"packing": False},
        "objective": Objective(entropy=EntropyTerm(coef=0.01), top_entropy_fraction=0.5),
    },
    "moving reference": {"objective": Objective(kl=MOVING)},
    "reference in the reward, several updates": {
        "objective": Objective(kl=KLTerm(coef=0.1, place="reward")),
        "update": UPDATES,
    },
    "lora with a reference": {"policy": LORA, "objective": Objective(kl=KLTerm(coef=0.1))},
    "lora with a moving reference": {
        "policy": LORA,
        "objective": Objective(kl=KLTerm(coef=0.1, refresh_every=2)),
    },
    "a rank without rewards": {"rewards": [NoRewardOnRank1()]},
    "experts of files, with a reference": {
        "policy": FROM_FILES | {"path": "experts"},
        "objective": Objective(kl=KLTerm(coef=0.1)),
    },
    "files, lora": {"policy": FROM_FILES | LORA},
    "tied, checkpointing": {
        "policy": FROM_FILES | {"path": "tied", "gradient_checkpointing": True}
    },
    "bf16-mixed": {"precision": "bf16-mixed"},
}
"""Each sets what does not depend on each other together: a training run takes seconds."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "kl_cov": {
        "objective": Objective(
            clip_low=1.0,
            clip_high=inf,
            covariance=CovarianceTerm(action="kl", fraction=0.2, coef=1.0),
        ),
        "update": UPDATES,
    },
    "teacher": {
        "objective": Objective(surrogate="none", distillation=DistillationTerm(coef=1.0, top_k=8)),
        "teacher": TEACHER,
    },
}
"""Whose losses depend on many tokens of all ranks, or on the top tokens of another model."""
SHALLOW = {"architecture": LLAMA | {"num_hidden_layers": 1}}
PADDED = SHALLOW | {"packing": False}
ONE_LAYER = {"lora": LoRA(rank=4, target_modules=["q_proj"])}
SEVERAL_ROWS = {"max_tokens_per_micro_batch": 200}
"""A batch of one row is compiled again."""
COMPILED: dict[str, dict[str, Any]] = {
    "shallow": {"policy": SHALLOW},
    "compile": {"policy": SHALLOW | {"compile": True}},
    "deep": {},
    "compile deep": {"policy": {"compile": True, "gradient_checkpointing": True}},
    "shallow lora": {"policy": PADDED | ONE_LAYER, "update": SEVERAL_ROWS},
    "compile lora": {"policy": PADDED | ONE_LAYER | {"compile": True}, "update": SEVERAL_ROWS},
}
"""A policy that is compiled in little time, and the same without."""
OWN_ENGINE: dict[str, dict[str, Any]] = {"own engine": {"engine": Declared()}}
REFUSED = {
    "bfloat16": {"policy": {"dtype": "bfloat16"}},
    "undeclared engine": {"engine": StopsEarly()},
}
"""What DeepSpeed does not train, and what cannot sample with divided weights."""
SAVED = {"untied": LLAMA, "tied": TIED, "experts": MIXTRAL}
"""Policies whose weights are in files of the working directory."""
SKIPPING = {
    "not finite": {"callbacks": [SpoilGradient()]},
    "rolled back": {"callbacks": [RollBack()]},
}
SFT: dict[str, dict[str, Any]] = {
    "sft": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "sft not finite": {"callbacks": [SpoilGradient()]},
}
RESUMED = ["moving reference", "lora with a reference"]
"""Cases that go on from a checkpoint: all weights, and those of an adapter."""
SFT_PROMPTS = [prompt(f"{n}+{n}=", id=str(n), answer=str(2 * n) * (n + 1)) for n in range(6)]


def write_policies(directory: Path) -> None:
    """Write the policies, in several files each, and the teacher."""
    perturbed(tiny_policy(seed=1)).save_pretrained(directory / TEACHER)
    for name, architecture in SAVED.items():
        policy = tiny_policy(architecture=architecture, seed=7)
        save_model(policy.model, directory / name, shard_bytes=20_000)
        policy.tokenizer.save_pretrained(directory / name)
