"""Train on the CPU and on the pretend device, and print what came of it as JSON.

This has to be a program of its own: torch makes room for the devices that it knows at the first
backward pass of a process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import flash_on_cpu
import yaml
from jsonargparse import ArgumentParser
from loss_batches import counts_of, random_case
from pretend_device import pretend_device, pretend_strategy
from small_runs import PROMPTS, Keep, make_module, make_trainer, weights
from tiny import perturbed, tiny_policy

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data import PromptLoader
from lit_grpo.objective import DistillationTerm, EntropyTerm, KLTerm, Objective
from lit_grpo.objective.loss import token_losses
from lit_grpo.policy import LoRA, packed_attention
from lit_grpo.training import Evaluation, GRPOModule

TEACHER = TemporaryDirectory()
perturbed(tiny_policy(seed=1)).save_pretrained(TEACHER.name)


def distil(**term: Any) -> dict[str, Any]:
    objective = Objective(surrogate="none", distillation=DistillationTerm(coef=1.0, **term))
    return {"objective": objective, "teacher": TEACHER.name}


KL = Objective(kl=KLTerm(coef=0.1, refresh_every=1))
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"policy": {"lora": LoRA(rank=4)}},
    "reference": {"objective": KL, "policy": {"gradient_checkpointing": True}},
    "reference adapter": {"objective": KL, "policy": {"lora": LoRA(rank=4)}},
    "KL in the reward": {"objective": Objective(kl=KLTerm(coef=0.1, place="reward"))},
    "updates": {"update": {"epochs": 2, "minibatches": 2}},
    "entropy": {"objective": Objective(top_entropy_fraction=0.5, entropy=EntropyTerm(coef=0.1))},
    "teacher": distil(),
    "top tokens of a teacher": distil(top_k=8),
    "padded": {"policy": {"packing": False}},
}
MAX_STEPS = 4
PRESETS = files("lit_grpo.configs") / "presets"


class CountMicroBatches(Keep):
    count = 0

    def on_stage_end(self, trainer, pl_module, stage):
        self.count += stage.micro_batch is not None


def trainer_options(*, on_device: bool) -> dict[str, Any]:
    return {"accelerator": "auto", "strategy": pretend_strategy()} if on_device else {}


def train(settings, *callbacks, on_device=True, max_steps=MAX_STEPS, **fit) -> GRPOModule:
    module = make_module(**settings)
    trainer = make_trainer(*callbacks, max_steps=max_steps, **trainer_options(on_device=on_device))
    trainer.fit(module, PromptLoader(PROMPTS, 4), weights_only=True, **fit)
    return module


def difference(module: GRPOModule, other: GRPOModule) -> float:
    pairs = zip(weights(module).values(), weights(other).values(), strict=True)
    return max(float((one - another).abs().max()) for one, another in pairs)


def compare(name: str) -> dict[str, Any]:
    """Train one of the runs on both devices."""
    expected = train(RUNS[name], on_device=False)
    with pretend_device():
        module = train(RUNS[name])
    start = make_module(policy=RUNS[name].get("policy"))
    start.configure_model()
    return {
        "difference": difference(module, expected),
        "learned": difference(module, start),
        "uses_packing": module.policy.causal_model.uses_packing,
    }


def compare_merged() -> dict[str, Any]:
    """Train on the device with merged attention, which the CPU does not use."""
    flash_on_cpu.install()
    is_on_device = {"pretend": True, "cpu": False}
    with patch.object(
        packed_attention, "_can_merge", lambda query, *_: is_on_device[query.device.type]
    ):
        return compare("reference")


def difference_after_a_resume() -> float:
    with pretend_device(), TemporaryDirectory() as directory:
        expected = train({})
        train({}, Checkpoints(dirpath=str(directory)), max_steps=2)
        return difference(train({}, ckpt_path=Path(directory) / "last.ckpt"), expected)


def objective_of(preset: Traversable) -> Objective:
    parser = ArgumentParser()
    parser.add_argument("--objective", type=Objective, default=Objective())
    model = yaml.safe_load(preset.read_text())["model"]
    made = parser.instantiate(parser.parse_object({"objective": model["objective"]}))
    assert isinstance(made.objective, Objective)
    return made.objective


def loss_of(objective: Objective, device: str) -> list[float]:
    """Return loss and gradient of a random micro-batch on a device."""
    case = random_case(1)
    chosen = {
        "covariance_mask": case.batch.loss_mask,
        "is_good": case.batch.advantages > 0,
        "teacher_logprobs": case.logprobs - 0.3,
    }
    batch, counts = replace(case.batch, **chosen), counts_of(case.batch)
    logprobs = case.logprobs.to(device).requires_grad_()
    entropy = case.entropy.to(device, logprobs.dtype)
    losses = token_losses(logprobs, entropy, batch.to(device), counts, objective, entropy_coef=0.1)
    losses.loss.backward()
    gradient = logprobs.grad
    assert gradient is not None
    return [losses.loss.item(), *gradient.cpu().flatten().tolist()]


def loss_difference(preset: Traversable) -> float:
    """Return how much the loss of a preset and its gradient differ between the devices."""
    objective = objective_of(preset)
    with pretend_device():
        on_device = loss_of(objective, "pretend")
    return max(abs(a - b) for a, b in zip(on_device, loss_of(objective, "cpu"), strict=True))


def evaluate(*, on_device: bool) -> dict[str, float]:
    module = make_module()
    module.evaluation = Evaluation(num_samples=2)
    with pretend_device():
        trainer = make_trainer(**trainer_options(on_device=on_device))
        (metrics,) = trainer.validate(module, PromptLoader(PROMPTS, 4, training=False))
    return metrics


def waits_with(max_tokens: int) -> dict[str, Any]:
    """Return the number of micro-batches of a run, and where the host waited how often."""
    update = {"minibatches": 2, "max_tokens_per_micro_batch": max_tokens}
    with pretend_device() as waits:
        counter = CountMicroBatches()
        train({"update": update, "objective": KL}, counter)
        return {"micro_batches": counter.count, "waits": dict(waits)}


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "runs": {name: compare(name) for name in RUNS} | {"merged": compare_merged()},
                "presets": {preset.name: loss_difference(preset) for preset in PRESETS.iterdir()},
                "difference_after_a_resume": difference_after_a_resume(),
                "metrics": [evaluate(on_device=on_device) for on_device in (False, True)],
                "few_micro_batches": waits_with(10_000),
                "many_micro_batches": waits_with(1),
            }
        )
    )
