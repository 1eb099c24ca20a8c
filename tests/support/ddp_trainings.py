"""Trainings of two ranks: `main` runs those that its arguments name, one after the other.

Each rank saves what it has of a training run as ``NAME-rankN.pt`` in the working directory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from easy_prompts import EqualOnEasyPrompts, prompts
from http_answers import answering
from overlapping import OverlappingEngine, SaveAhead
from small_runs import PROMPTS, Keep, ShareOfLowBytes, make_module, make_trainer, weights
from teacher_server import vllm_replies
from tiny import perturbed, tiny_policy

from lit_grpo.callbacks import Checkpoints, HealthMonitor, Rule
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import AdvantageConfig, DistillationTerm, EntropyTerm, KLTerm, Objective
from lit_grpo.policy import Policy
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout import VLLMTeacher
from lit_grpo.stopping import get_stop_reason
from lit_grpo.training import GRPOModule, MasterAdamW, OutagePolicy
from lit_grpo.types import Prompt


def fit_ranks(
    module: GRPOModule,
    rows: Sequence[Prompt],
    batch_size: int,
    *callbacks: L.Callback,
    ckpt_path: str | None = None,
    max_steps: int = 1,
    trainer_settings: Mapping[str, Any] = MappingProxyType({"strategy": "ddp", "devices": 2}),
    **loading: Any,
) -> L.Trainer:
    trainer = make_trainer(*callbacks, max_steps=max_steps, **trainer_settings)

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> PromptLoader:
            rank = trainer.global_rank
            world_size = trainer.world_size
            return PromptLoader(rows, batch_size, rank=rank, world_size=world_size, **loading)

    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def one_step(*, rewards_are_lost_on_rank_1: bool) -> dict[str, Any]:
    class LostOnRank1(ShareOfLowBytes):
        def score(self, prompt, completion):
            if rewards_are_lost_on_rank_1 and module.global_rank == 1:
                raise ConnectionError("lost")
            return super().score(prompt, completion)

    module = make_module(
        rewards=[LostOnRank1()],
        advantage=AdvantageConfig(deviation="batch"),
        update={"max_tokens_per_micro_batch": 60},
    )
    keep = Keep()
    fit_ranks(module, PROMPTS, 4, keep, shuffle=False)
    (output,) = keep.outputs
    batch = output["batch"]
    return {
        "batch": {name: getattr(batch, name) for name in type(batch).__dataclass_fields__},
        "rewards": output["rollouts"].rewards,
        "weights": weights(module),
        "metrics": output["metrics"],
    }


def refill() -> dict[str, Any]:
    objective = Objective(
        aggregation="local_token",
        entropy=EntropyTerm(coef=0.01, target=100.0),
        top_entropy_fraction=0.5,
    )
    module = make_module(
        rewards=[EqualOnEasyPrompts()], dynamic_sampling_rounds=2, objective=objective
    )
    keep = Keep()
    # The first rank lacks two groups and then one, the second none.
    rows = prompts("eehhhehhhhhhhhhhhh")
    fit_ranks(module, rows, 4, keep, max_steps=2, shuffle=False)
    batches = [output["batch"] for output in keep.outputs]
    return {
        "ids": [[g.prompt.id for g in output["rollouts"].groups] for output in keep.outputs],
        "weights": weights(module),
        "metrics": [output["metrics"] for output in keep.outputs],
        "entropy": [(batch.loss_mask.sum(), batch.entropy_mask.sum()) for batch in batches],
    }


def outage(*, directory: str, num_attempts: float, ckpt_path: str | None = None) -> dict[str, Any]:
    """Train while the second rank has no scores in so many attempts at the second step."""

    class DownOnRank1(ShareOfLowBytes):
        num_calls = 0

        def score(self, prompt, completion):
            self.num_calls += 1
            is_down = 4 < self.num_calls <= 4 + 4 * num_attempts
            if module.global_rank == 1 and module.rollout_step == 1 and is_down:
                raise ConnectionError("lost on one rank")
            return super().score(prompt, completion)

    policy = OutagePolicy(
        max_absent_fraction=0.4, first_pause_seconds=0.1, give_up_after_seconds=0.3
    )
    module = make_module(rewards=[DownOnRank1()], outage=policy)
    saving = Checkpoints(dirpath=str(directory))
    trainer = fit_ranks(module, PROMPTS, 2, saving, ckpt_path=ckpt_path, max_steps=3, seed=3)
    reason = get_stop_reason(trainer)
    return {
        "weights": weights(module),
        "reason": reason and reason.message,
        "step": module.rollout_step,
    }


def ahead(strategy: str, *, is_resumed: bool = False) -> dict[str, Any]:
    """Train with a step sampled ahead; save after two steps, once the third is sampled."""
    module = make_module(engine=(engine := OverlappingEngine()), max_head_offpolicyness=1)
    path, keep = Path(f"ahead-{strategy}.ckpt"), Keep()
    saving = SaveAhead(path, 2, lambda: engine.num_ended == 3)
    fit_ranks(
        module,
        PROMPTS,
        2,
        keep,
        *([] if is_resumed else [saving]),
        ckpt_path=str(path) if is_resumed else None,
        max_steps=4,
        trainer_settings={"strategy": strategy, "devices": 2},
        seed=3,
    )
    completions = [output["rollouts"].completions for output in keep.outputs]
    return {
        "weights": {name: one.clone() for name, one in named_weights(module.policy.model)},
        "num_generations": engine.num_generations,
        "token_ids": [[one.token_ids for one in step] for step in completions],
        "versions": [{*one.policy_versions} for step in completions for one in step],
    }


def distillation() -> dict[str, Any]:
    """Take a step with a teacher whose server then fails the second rank."""
    replies = vllm_replies(start_teacher())
    complete = replies["POST /v1/completions"]

    def fail_rank_1_in_the_second_step(body):
        is_failing = module.global_rank == 1 and module.rollout_step == 1
        return (500, {"error": "out of memory"}) if is_failing else complete(body)

    replies["POST /v1/completions"] = fail_rank_1_in_the_second_step
    with answering(replies) as url:
        module = make_module(
            teacher=VLLMTeacher([url], give_up_after_seconds=0),
            objective=Objective(surrogate="none", distillation=DistillationTerm(coef=1.0)),
        )
        keep = Keep()
        trainer = fit_ranks(module, PROMPTS, 4, keep, max_steps=2, shuffle=False)
    reason, batch = get_stop_reason(trainer), keep.outputs[0]["batch"]
    return {
        "batch": {name: getattr(batch, name) for name in type(batch).__dataclass_fields__},
        "weights": weights(module),
        "reason": reason and reason.message,
        "step": module.rollout_step,
    }


class SpoilRank0(L.Callback):
    """Spoil a weight of the first rank only, after the third rollout step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if module.rollout_step == 3 and trainer.is_global_zero:
            module.policy.trainable_parameters()[0].data.view(-1)[0] = float("nan")


def rollback() -> dict[str, Any]:
    module = make_module()
    saving = Checkpoints(dirpath="rollback", every_n_steps=1)
    fit_ranks(module, PROMPTS, 2, SpoilRank0(), HealthMonitor(), saving, max_steps=5, seed=3)
    return {
        "weights": weights(module),
        "num_rollbacks": module.num_rollbacks,
        "step": module.rollout_step,
    }


def health() -> dict[str, Any]:
    """Train with equal rewards on the first rank only, and a rule that skips updates."""

    class EqualOnRank0(ShareOfLowBytes):
        def score(self, prompt, completion):
            return 0.5 if module.global_rank == 0 else super().score(prompt, completion)

    module = make_module(rewards=[EqualOnRank0()])
    monitor = HealthMonitor({"identical_completions": Rule(action="skip")})
    fit_ranks(module, PROMPTS, 4, monitor, max_steps=2, shuffle=False)
    return {"num_due": {n: one.num_due for n, one in monitor._watched.items() if one.num_due}}


def masters() -> dict[str, Any]:
    """Train bfloat16 weights on float32 masters."""
    module = make_module(
        policy={"dtype": "bfloat16"},
        optimizer=lambda params: MasterAdamW(params, lr=1e-3),
        objective=Objective(kl=KLTerm(coef=0.1)),
        update={"max_grad_norm": 0.1},
    )
    trainer = fit_ranks(module, PROMPTS, 4, max_steps=2, shuffle=False)
    states = trainer.optimizers[0].state
    return {
        "weights": weights(module),
        "masters": [states[one]["master"] for one in module.policy.trainable_parameters()],
    }


def start_teacher() -> Policy:
    return perturbed(tiny_policy(seed=1))


AHEAD = ["ddp", "fsdp2", *(["deepspeed_stage_2"] if find_spec("deepspeed") else [])]
"""Strategies under which rollouts are sampled ahead."""
TRAININGS: dict[str, Callable[[], dict[str, Any]]] = {
    "both-ranks": lambda: one_step(rewards_are_lost_on_rank_1=False),
    "one-rank-without-rewards": lambda: one_step(rewards_are_lost_on_rank_1=True),
    "refill": refill,
    "distillation": distillation,
    "rollback": rollback,
    "health": health,
    "masters": masters,
    "undisturbed": lambda: outage(directory="undisturbed", num_attempts=0),
    "short-outage": lambda: outage(directory="short-outage", num_attempts=2),
    "long-outage": lambda: outage(directory="long-outage", num_attempts=float("inf")),
    **{f"ahead-{name}": partial(ahead, name) for name in AHEAD},
    "resumed": lambda: outage(
        directory="resumed", num_attempts=0, ckpt_path="long-outage/last.ckpt"
    ),
    **{f"resumed-ahead-{name}": partial(ahead, name, is_resumed=True) for name in AHEAD},
}
RESUMED = [name for name in TRAININGS if name.startswith("resumed")]
"""They go on from the checkpoints of others, in new processes."""


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        result = TRAININGS[name]()
        torch.save(result, f"{name}-rank{torch.distributed.get_rank()}.pt")
