"""Small GRPO runs with random weights, and what is needed to check them independently."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from tiny import LLAMA, prompt, tiny_policy

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.policy import Policy
from lit_grpo.rewards import Reward
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.training import Evaluation, GRPOModule, UpdateConfig
from lit_grpo.types import Completion

PROMPTS = [prompt(text, id=text) for text in ("1+1=", "a longer one:", "x", "22+3=")]


class ShareOfLowBytes(Reward):
    """Give rewards that differ between the completions of random weights."""

    def score(self, prompt, completion):
        return sum(token < 128 for token in completion.token_ids) / len(completion.token_ids)


class Keep(L.Callback):
    """Keep what every training step returned."""

    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)


class Recorded(HFEngine):
    """Keep what every call sampled."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[tuple[int, Completion]]] = []

    def generate(self, *args: Any, **options: Any) -> Iterator[tuple[int, Completion]]:
        self.calls.append(list(super().generate(*args, **options)))
        yield from self.calls[-1]


class Replayed(HFEngine):
    """Give what another engine sampled: with other rounding another token may be drawn."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._calls = iter(recorded.calls)

    def generate(self, *_: Any, **__: Any) -> Iterator[tuple[int, Completion]]:
        yield from next(self._calls)


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def make_module(*, policy=None, rewards=None, update=None, **settings) -> GRPOModule:
    return GRPOModule(
        Policy(**({"architecture": LLAMA} | (policy or {}))),
        rewards or [ShareOfLowBytes()],
        group_size=settings.pop("group_size", 4),
        sampling=settings.pop("sampling", Sampling(max_tokens=8, stop_token_ids=tuple(range(40)))),
        update=UpdateConfig(**({"max_grad_norm": 1e9} | (update or {}))),
        optimizer=settings.pop("optimizer", sgd),
        evaluation=settings.pop("evaluation", Evaluation(before_training=False)),
        **settings,
    )


def make_trainer(*callbacks, **options) -> L.Trainer:
    defaults = {
        "max_steps": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(module, *, callbacks=(), prompts=PROMPTS, shuffle=True, ckpt_path=None, **trainer):
    """Train for some optimizer steps; return what each training step returned."""
    keep = Keep()
    loader = PromptLoader(prompts, 4, shuffle=shuffle)
    make_trainer(keep, *callbacks, **trainer).fit(
        module, loader, ckpt_path=ckpt_path, weights_only=True
    )
    return keep.outputs


def fit_and_evaluate(module, *callbacks):
    """Train for two rollout steps with an evaluation after each."""
    keep = Keep()
    trainer = make_trainer(keep, *callbacks, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, PromptLoader(PROMPTS, 4), PromptLoader(PROMPTS, 4, training=False))
    return trainer, keep.outputs


def policy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def weights(module) -> dict[str, torch.Tensor]:
    return policy_weights(module.policy)


def start_policy() -> Policy:
    """Return the initial policy of a run of `make_module`."""
    return tiny_policy()


def start_weights() -> dict[str, torch.Tensor]:
    return policy_weights(start_policy())


def assert_same_runs(runs, *, rtol: float, atol: float, metrics_atol: float) -> None:
    """Check that the (weights, metrics) of all runs are those of the last one, up to rounding."""
    whole_weights, whole_metrics = runs[-1]
    for split_weights, split_metrics in runs[:-1]:
        for name, whole in whole_weights.items():
            torch.testing.assert_close(split_weights[name], whole, rtol=rtol, atol=atol)
        for name, value in whole_metrics.items():
            assert split_metrics[name] == pytest.approx(value, abs=metrics_atol), name
