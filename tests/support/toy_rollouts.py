"""Hand-made rollouts, and a real one-layer module that passes them to callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import tiny
import torch

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.types import Completion, Outcome, RolloutBatch, Score, TrainBatch


def completion(text: str = "7", finish_reason: str = "stop", logprob: float = -0.5) -> Completion:
    """Build a completion with one token per character."""
    logprobs = [logprob] * len(text)
    return tiny.completion(
        list(map(ord, text)), text=text, logprobs=logprobs, finish_reason=finish_reason
    )


def failed(outcome: Outcome, detail: str = "", seconds: float = 0.0) -> Score:
    return Score(value=None, outcome=outcome, detail=detail, seconds=seconds)


def rollouts(
    rewards: Sequence[Sequence[float | Score | None]],
    completions: Sequence[Completion] | None = None,
) -> RolloutBatch:
    """Build groups scored by one reward ``math``; None abstains. Completions differ by default."""
    size = len(rewards[0])
    if completions is None:
        completions = [completion(f"answer {n}") for n in range(len(rewards) * size)]
    groups = [completions[start : start + size] for start in range(0, len(completions), size)]
    scores = [[_score(value) for value in row] for row in rewards]
    return tiny.rollouts(scores, groups, parts={"math": scores})


def _score(value: float | Score | None) -> Score:
    if isinstance(value, Score):
        return value
    return failed(Outcome.ABSTAIN) if value is None else Score(value=value, seconds=0.25)


def train_batch(advantages: Sequence[float], trained: Sequence[bool] | None = None) -> TrainBatch:
    """Build a batch with one token per completion."""
    num_rows = len(advantages)
    ones = torch.ones(num_rows, 1, dtype=torch.bool)
    mask = ones if trained is None else torch.tensor(trained)[:, None]
    return TrainBatch(
        prompt_ids=torch.ones(1, 1, dtype=torch.long),
        prompt_mask=ones[:1],
        prompt_index=torch.zeros(num_rows, dtype=torch.long),
        completion_ids=torch.ones(num_rows, 1, dtype=torch.long),
        completion_mask=ones,
        loss_mask=mask,
        advantages=torch.tensor(advantages),
        sampler_logprobs=torch.full((num_rows, 1), -0.5),
    )


def outputs(
    batch: RolloutBatch, trained: TrainBatch | None = None, **metrics: float
) -> dict[str, Any]:
    return {"rollouts": batch, "batch": trained, "metrics": metrics}


class ToyModule(L.LightningModule):
    """Optimize one layer manually; step n returns ``make_outputs(n)``."""

    def __init__(self, make_outputs: Callable[[int], dict[str, Any]], num_updates: int = 1) -> None:
        super().__init__()
        self.num_updates = num_updates
        self.linear = torch.nn.Linear(2, 1)
        self.automatic_optimization = False
        self.make_outputs = make_outputs

    def num_batches(self, optimizer_steps: int) -> int:
        return -(-optimizer_steps // self.num_updates)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        optimizer: Any = self.optimizers()
        for _ in range(self.num_updates):
            optimizer.zero_grad()
            loss = self.linear(torch.stack(batch)).square().sum()
            self.manual_backward(loss)
            optimizer.step()
        made = self.make_outputs(self.trainer.fit_loop.total_batch_idx)
        self.log_dict({"policy/loss": loss.detach()} | made.get("metrics", {}))
        return made

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/accuracy", 0.5, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(num_batches: int, *, training: bool = True) -> PromptLoader:
    """Return a loader of batches of one row, all different, shuffled in training."""
    rows: Any = list(torch.arange(2.0 * num_batches).view(num_batches, 2) / num_batches)
    return PromptLoader(rows, 1, training=training)


DEFAULTS = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 1,
}


def fit(
    make_outputs: Callable[[int], dict[str, Any]],
    callbacks: list[Any],
    *,
    steps: int = 3,
    logger: Any = False,
    ckpt_path: Path | None = None,
    validate_every: int | None = None,
    num_updates: int = 1,
    num_batches: int = 100,
    **options: Any,
) -> L.Trainer:
    """Train for some optimizer steps; ``options`` are further arguments of the Trainer."""
    trainer = L.Trainer(
        max_steps=steps,
        callbacks=callbacks,
        logger=logger,
        check_val_every_n_epoch=None,
        val_check_interval=validate_every or 100,
        limit_val_batches=1 if validate_every else 0,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        **(DEFAULTS | options),
    )
    module = ToyModule(make_outputs, num_updates)
    train, held_out = loader(num_batches), loader(1, training=False)
    trainer.fit(module, train, held_out, ckpt_path=ckpt_path)
    return trainer
