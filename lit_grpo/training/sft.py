"""Supervised fine-tuning (SFT): train a policy on given completions, as a warm-up for GRPO.

GRPO starts from the final model, whose completions then earn some reward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import AdamW, Optimizer

from lit_grpo.data import TrainingLoader
from lit_grpo.data.rows.columns import to_text
from lit_grpo.data.rows.gold import answer_place, first_of
from lit_grpo.diagnostics.step_log import step_number
from lit_grpo.distributed.gradients import steps_of
from lit_grpo.policy.chat_template import SET_EOS, end_of_turn
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.policy.policy import PolicyOrPath
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.stopping import stop_run
from lit_grpo.training.batching import collate_tokens
from lit_grpo.training.checks.compatibility import refuse_adaptive
from lit_grpo.training.evaluated_module import EvaluatedModule
from lit_grpo.training.evaluation import Evaluation
from lit_grpo.training.optimizer.learning_rate import Schedule
from lit_grpo.training.optimizer.skipped_steps import SkippedSteps
from lit_grpo.types import (
    Prompt,
    RunningStage,
    StageProgress,
    TokenBatch,
    UserError,
)
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 5
"""Optimizer steps in a row without a finite gradient after which a warm-up ends."""
SHOWN_CHARACTERS = 80
"""How much of a target is logged."""
END_TOKENS = 64
"""Upper bound of the tokens that an end token and reasoning tags add to a target's bytes."""


@checks_keywords
class SFTModule(EvaluatedModule):
    """Train a policy to continue each prompt with its target text and the token that ends it.

    A conversation ends with the token with which the chat template ends a turn, and plain text
    with the end-of-sequence token. If the prompt ends with the tag that opens the reasoning, the
    target need not have it.

    Every token of a batch has the same weight, for any number of ranks. With
    ``trainer.accumulate_grad_batches`` every accumulated batch has the same weight, as usual in
    Lightning.

    Args:
        policy: The model to train.
        target_column: Column with the text to imitate; null uses the gold answer, of a list of
            them the first.
        sampling: Temperature, token limit and other settings of sampling in evaluation.
        engine: The rollout engine that samples in evaluation; null samples with the policy itself.
        optimizer: Builds the optimizer from the trainable parameters. The default suits full
            fine-tuning; LoRA takes about 10 times the learning rate.
        lr_schedule: Schedule of the learning rate over the optimizer steps of the run.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        evaluation: How held-out accuracy is measured.
        seed: Seed of all random numbers of the run.
    """

    samples_in_training = False
    usual_lora_rate = 2e-4

    def __init__(
        self,
        policy: PolicyOrPath,
        target_column: str | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        engine: RolloutEngine | None = None,
        optimizer: OptimizerCallable = lambda params: AdamW(params, lr=2e-5, weight_decay=0.0),
        lr_schedule: Schedule = "constant",
        warmup_steps: int = 0,
        evaluation: Evaluation | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            policy, sampling, engine, optimizer, lr_schedule, warmup_steps, evaluation, seed
        )
        self.target_column = target_column
        self._num_tokens = 0
        self.skipped_steps = SkippedSteps(self.events.report_skipped_step, MAX_SKIPPED_STEPS)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"target_column": self.target_column}

    def check_loader(self, loader: TrainingLoader) -> None:
        super().check_loader(loader)
        refuse_adaptive(loader, "in a warm-up, which has no rewards")
        has_end = self.tokenizer.eos_token_id is not None
        for prompt in loader.some_prompts():
            self.target(prompt)
            if not has_end:
                self.end_token(prompt)

    def check_start(self) -> None:
        super().check_start()
        loader: TrainingLoader = self.trainer.train_dataloader  # type: ignore[assignment]
        self.check_targets_fit(max_positions(self.policy.model.config), loader.some_prompts())

    def check_targets_fit(self, positions: int | None, prompts: Sequence[Prompt]) -> None:
        """Check that the model has positions for each prompt with the text that is imitated.

        Args:
            positions: Most tokens of both together; None for no limit.

        Raises:
            UserError: it has too few.
        """
        if positions is None:
            return
        lengths = {
            one.id: (len(one.token_ids), len(self.target_ids(one)))
            for one in prompts  # of which few need to be tokenized: a token is a byte or more
            if len(one.token_ids) + len(self.target(one).encode()) + END_TOKENS > positions
        }
        too_long = {id: pair for id, pair in lengths.items() if sum(pair) > positions}
        if too_long:
            worst = max(too_long, key=lambda id: sum(too_long[id]))
            prompt, target = too_long[worst]
            limit = positions - max(target for _, target in lengths.values())
            remedy = "Drop or shorten these rows"
            if any(len(one.token_ids) <= limit for one in prompts):
                remedy = f"Set data.max_prompt_tokens to at most {limit} and data.too_long to drop"
            raise UserError(
                f"a prompt and its target must fit into the model's {positions} positions "
                f"together, got {len(too_long)} of {len(prompts)} rows that do not: {worst} has "
                f"{prompt} + {target} tokens. {remedy}, or take a "
                "model with more positions."
            )

    def on_train_batch_start(self, batch: Sequence[Prompt], batch_idx: int) -> None:
        if not self._has_logged:
            rank_zero_only(log.info)("%s", self.describe_target(batch[0]))
        # A stage would need to contain the backward pass, which is Lightning's.
        self.events.running = RunningStage(
            name="update", started=time.perf_counter(), progress=self.progress
        )

    def on_train_batch_end(self, outputs: Any, batch: Sequence[Prompt], batch_idx: int) -> None:
        self.events.running = None
        super().on_train_batch_end(outputs, batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Leave out a step whose gradient is not finite; too many in a row end the run."""
        norm = steps_of(self.trainer.strategy).norm(self.policy.trainable_parameters())
        if norm.isfinite():
            self.skipped_steps.count_taken()
            return
        for parameter in self.policy.trainable_parameters():
            parameter.grad = None  # an optimizer leaves such a parameter as it is
        self.skipped_steps.count(f"batch {step_number(self.trainer)}", norm)
        if self.skipped_steps.num_at_limit:
            stop_run(self.trainer, self.skipped_steps.stop_reason())

    def progress(self) -> StageProgress:
        """Return how many target tokens have been trained on in this process."""
        return StageProgress(num_tokens=self._num_tokens)

    def training_step(self, prompts: Sequence[Prompt], batch_idx: int) -> dict[str, Any]:
        batch = self._collate(prompts)
        num_tokens = batch.completion_mask.sum()
        self._num_tokens += int(num_tokens)
        logprobs, entropy = completion_statistics(self.policy.body_and_head, batch)
        num_tokens = num_tokens.to(logprobs.device, non_blocking=True)
        # DDP averages gradients over ranks: dividing by the mean number of tokens per rank gives
        # every token of the batch the same weight.
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
        loader: Any = self.trainer.train_dataloader
        self.log_dict(loader.metrics())
        return {"loss": loss}

    def target(self, prompt: Prompt) -> str:
        """Return the text to imitate.

        Raises:
            UserError: the row has no such text.
        """
        column = self.target_column
        if column is not None:
            text = prompt.columns.get(column)
        else:
            is_list = isinstance(prompt.given_answer, list)
            text = first_of(prompt.given_answer) if is_list else prompt.answer
        if isinstance(text, int | float) and not isinstance(text, bool) and text == text:  # no NaN
            text = to_text(text)
        if not isinstance(text, str) or not text:
            place = "gold answer" if column is None else f"text in column {column!r}"
            raise UserError(
                f"prompt {prompt.id} has no {place} to imitate, got {text!r}; its columns are "
                f"{', '.join(prompt.columns) or 'none'}. Set model.target_column."
            )
        return text

    def describe_target(self, prompt: Prompt) -> str:
        """Describe the target in a line: its column, and the target of one prompt."""
        text = self.target(prompt)
        shown = repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…")
        if self.target_column is not None:
            return f"imitating column {self.target_column}, such as {shown}"
        place = answer_place(prompt.answer or "", prompt.columns)
        where = f" ({place})" if place else ""
        return f"imitating the gold answer{where}, such as {shown}; see model.target_column"

    def target_ids(self, prompt: Prompt) -> list[int]:
        """Return the tokens to imitate, with the one that ends them."""
        text, tokenizer = self.target(prompt), self.tokenizer
        if self.reasoning is not None:
            text = self.reasoning.continuation(prompt, text)
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token(prompt)]

    def end_token(self, prompt: Prompt) -> int:
        """Return the token that ends the target of a prompt.

        Raises:
            UserError: the tokenizer has none.
        """
        end = None if prompt.messages is None else end_of_turn(self.tokenizer)
        end = self.tokenizer.eos_token_id if end is None else end
        if end is None:
            raise UserError(
                "the tokenizer must have an end-of-sequence token, got one without (a warm-up "
                f"teaches the policy to end its answers with it). To give it one, {SET_EOS}"
            )
        return end

    def _collate(self, prompts: Sequence[Prompt]) -> TokenBatch:
        targets = [self.target_ids(prompt) for prompt in prompts]
        return collate_tokens(
            [prompt.token_ids for prompt in prompts], targets, pad_id=self.tokenizer.pad_token_id
        )
