"""Use a local reward model, any sequence classifier of ``transformers``, as a reward.

The model runs in its own thread, on batches of the completions that wait for their scores.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lit_grpo.rewards.reward import Reward, setting_key, started
from lit_grpo.rewards.reward_model.model import (
    Activation,
    Dtype,
    ScorerModel,
    ScorerSettings,
    load_scorer,
)
from lit_grpo.types import Completion, Prompt, Score, check_range
from lit_grpo.types.field_types import check_value, checks_types
from lit_grpo.types.paths import at_home

MIN_EQUAL_ROWS = 16
"""Number of consecutive rows with equal values at which the first warning is logged."""

_log = logging.getLogger(__name__)


@checks_types
class ScorerReward(Reward):
    """The output of a sequence classifier (``AutoModelForSequenceClassification``).

    A conversation is formatted with the chat template of the classifier's tokenizer, with the
    completion as the assistant's turn. Without a template, or if the prompt is plain text, prompt
    and completion are a text pair if the tokenizer has a separator (as BERT's has), and are
    concatenated otherwise; the turns of a conversation are then joined by empty lines, without
    the policy's chat markup.

    Unless ``reasoning`` is ``keep``, the completion is given without its reasoning. A text of more
    than ``max_tokens`` is not scored and has the outcome ``truncated``.

    Args:
        path: Directory or hub id of a reward model. It must have a trained classification head.
        label: Label whose output is the reward; needed only if there are several.
        activation: Function applied to the logits: ``none``, ``sigmoid``, or ``softmax`` over the
            labels. Null for ``none`` with one label and ``softmax`` with several.
        device: ``auto`` for the current GPU, or the CPU without one; else a torch device.
        dtype: Data type of the weights; ``auto`` for the checkpoint's.
        batch_size: Maximum number of completions in a forward pass.
        max_tokens: Maximum length of prompt and completion together; null for the model's limit.
        trust_remote_code: Whether to run the model code of a hub repository.
    """

    reasoning = "strip"

    def __init__(
        self,
        path: str,
        label: str | None = None,
        activation: Activation | None = None,
        device: str = "auto",
        dtype: Dtype = "auto",
        batch_size: int = 16,
        max_tokens: int | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_value(setting_key(self, "activation"), activation, Activation | None)
        check_value(setting_key(self, "dtype"), dtype, Dtype)
        check_range(setting_key(self, "batch_size"), batch_size, at_least=1)
        check_range(setting_key(self, "max_tokens"), max_tokens, at_least=1)
        self.settings = ScorerSettings(
            path=at_home(path),
            label=label,
            activation=activation,
            device=device,
            dtype=dtype,
            max_tokens=max_tokens,
            trust_remote_code=trust_remote_code,
        )
        self.batch_size = batch_size
        self._scorer: ScorerModel | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._batching: asyncio.Task[None] | None = None
        self._waiting: list[_Row] = []
        self._equal_rows = _EqualRows()

    def start(self) -> None:
        """Load the model.

        Raises:
            UserError: there is no reward model, or a setting does not fit it.
        """
        self._scorer = load_scorer(self.settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self.name}")

    async def score(self, prompt: Prompt, completion: Completion) -> float | Score:
        scorer = started(self._scorer, self)
        loop = asyncio.get_running_loop()
        row = _Row(prompt=prompt, completion=completion, result=loop.create_future())
        self._waiting.append(row)
        if self._batching is None or self._batching.done():
            self._batching = loop.create_task(self._score_batches(scorer))
        return await row.result

    async def close(self) -> None:
        """Drop waiting rows, stop the pass in flight at its next layer, and free the model."""
        for pending in (self._batching, *(row.result for row in self._waiting)):
            if pending is not None:
                pending.cancel()
        if self._scorer is not None and self._thread is not None:
            self._scorer.stop()
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._scorer = self._thread = self._batching = None
        self._waiting = []

    async def _score_batches(self, scorer: ScorerModel) -> None:
        loop = asyncio.get_running_loop()
        while batch := self._next_batch():
            try:
                scores = await loop.run_in_executor(self._thread, scorer.score, batch)
            except asyncio.CancelledError:
                for row in batch:
                    row.result.cancel()
                raise
            for row, score in zip(batch, scores, strict=True):
                row.deliver(score)
                self._warn_if_constant(scorer, row, score)

    def _next_batch(self) -> list[_Row]:
        """Take the longest waiting rows: rows of similar length need little padding."""
        waiting = [row for row in self._waiting if not row.result.done()]
        waiting.sort(key=lambda row: row.num_characters)
        self._waiting = waiting[: -self.batch_size]
        return waiting[-self.batch_size :]

    def _warn_if_constant(self, scorer: ScorerModel, row: _Row, score: float | Score) -> None:
        if isinstance(score, Score) or not self._equal_rows.add(row, score):
            return
        _log.warning(
            "reward %r gave %d completions in a row the value of another completion of their "
            "prompt, most recently %.6g. Without differences within groups, nothing is learned. "
            "Its activation may saturate (set activation: none), its template may not fit the "
            "prompts, or the model may not fit the task. The end of its last input: …%s",
            *(self.name, self._equal_rows.count, score, scorer.end_of_text(row)),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    """A completion that waits for its score."""

    prompt: Prompt
    completion: Completion
    result: asyncio.Future[float | Score]

    @property
    def num_characters(self) -> int:
        return len(self.prompt.text) + len(self.completion.text)

    def deliver(self, score: float | Score) -> None:
        if not self.result.done():
            self.result.set_result(score)


@dataclass(slots=True, kw_only=True)
class _EqualRows:
    """Count the rows since two completions of a prompt last got different values."""

    count: int = 0
    _first: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, row: _Row, value: float) -> bool:
        """Count a row, and return whether to warn: after 16, 32, 64, … rows."""
        text, first = self._first.setdefault(row.prompt.id, (row.completion.text, value))
        if row.completion.text == text:
            return False
        if not math.isclose(value, first, rel_tol=1e-4, abs_tol=1e-6):
            self.count = 0
            self._first.clear()
            return False
        self.count += 1
        return self.count >= MIN_EQUAL_ROWS and self.count.bit_count() == 1
