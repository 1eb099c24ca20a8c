"""Supervised warm-up: the policy imitates given completions, so that GRPO has something to reward.

Automatic optimization; its final model is where GRPO starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable

from lit_grpo.policy import Policy
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.policy.padding import pad
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.training.base import PolicyModule, Schedule, default_optimizer
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.types import Prompt, TrainBatch, UserError


class SFTModule(PolicyModule):
    """Maximum likelihood of a target text after each prompt, and of its end.

    Every token of a batch weighs the same, whatever the number of ranks; with
    ``trainer.accumulate_grad_batches`` every batch does, as Lightning has it.

    Args:
        policy: The model to train.
        target_column: Column with the text to imitate; null for the gold answer itself.
        sampling: How completions are drawn in evaluation.
        engine: What draws them.
        optimizer: Made from the trainable parameters.
        lr_schedule: Shape of the learning rate over the run's optimizer steps.
        warmup_steps: Optimizer steps of linear warm-up.
        evaluation: How held-out accuracy is measured.
        seed: Of everything that is drawn.
    """

    def __init__(
        self,
        policy: Policy,
        target_column: str | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engine: RolloutEngine | None = None,
        optimizer: OptimizerCallable = default_optimizer,
        lr_schedule: Schedule = "constant",
        warmup_steps: int = 0,
        evaluation: Evaluation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            policy, sampling, engine, optimizer, lr_schedule, warmup_steps, evaluation, seed
        )
        self.target_column = target_column

    def training_step(self, prompts: Sequence[Prompt], batch_idx: int) -> dict[str, Any]:
        batch = self._collate(prompts).to(self.device)
        logprobs, entropy = completion_statistics(self.policy.causal_model, batch)
        num_tokens = batch.completion_mask.sum()
        # Ranks average their gradients; every token of the batch weighs the same on all of them.
        mean_tokens = self.trainer.strategy.reduce(num_tokens.float(), reduce_op="mean")
        loss = -logprobs.sum() / mean_tokens
        self.log_dict(
            {
                "sft/loss": loss.detach(),
                "sft/entropy": entropy.sum() / num_tokens,
                "sft/lr": self.optimizers().param_groups[0]["lr"],  # type: ignore[union-attr]
            },
            sync_dist=True,
        )
        return {"loss": loss}

    def target(self, prompt: Prompt) -> str:
        """The text to imitate.

        Raises:
            ValueError: the row has none.
        """
        column = self.target_column
        text = prompt.answer if column is None else prompt.columns.get(column)
        if not isinstance(text, str) or not text:
            place = "gold answer" if column is None else f"text in column {column!r}"
            raise UserError(
                f"prompt {prompt.id} has no {place} to imitate, got {text!r}; its columns are "
                f"{', '.join(prompt.columns) or 'none'}. Set model.target_column."
            )
        return text

    def _collate(self, prompts: Sequence[Prompt]) -> TrainBatch:
        tokenizer = self.tokenizer
        targets = [
            [
                *tokenizer(self.target(prompt), add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ]
            for prompt in prompts
        ]
        pad_id = tokenizer.pad_token_id
        prompt_ids, prompt_mask = pad([p.token_ids for p in prompts], pad_id, torch.long, left=True)
        completion_ids, completion_mask = pad(targets, pad_id, torch.long)
        return TrainBatch(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            prompt_index=torch.arange(len(prompts)),
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=completion_mask,
            advantages=torch.ones(len(prompts)),
            sampler_logprobs=torch.zeros(completion_ids.shape),
        )
