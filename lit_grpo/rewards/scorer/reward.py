"""A local reward model as the reward: any sequence classifier of ``transformers``, in batches.

It never scores a text that was cut, nor with a head that was not trained. The model runs in a
thread of its own beside the policy and touches no global setting.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.scorer.model import (
    Activation,
    Dtype,
    ScorerModel,
    ScorerSettings,
    load_scorer,
)
from lit_grpo.types import Completion, Prompt, Score, UserError

MIN_ALIKE_ROWS = 16

_log = logging.getLogger(__name__)


class ScorerReward(Reward):
    """What a sequence classifier (``AutoModelForSequenceClassification``) makes of a completion.

    It reads a conversation through the chat template of its own tokenizer, with the completion as
    the assistant's turn. Without a template, or for a prompt that is plain text, it reads prompt
    and completion as a pair when its tokenizer has a separator (BERT), else one after the other;
    the turns of a conversation are then joined by empty lines, without the policy's markup.

    A text of more than ``max_tokens`` is not scored but has the outcome ``truncated``, since the
    score of a part is not the score of the completion.

    Args:
        path: directory or hub id of a reward model. A model without a trained classification
            head, such as a plain language model, is refused.
        label: which of several labels is the reward; needless with one.
        activation: what becomes of the logits: ``none``, ``sigmoid``, or ``softmax`` over the
            labels. ``none`` with one label and ``softmax`` with several when not given.
        device: ``auto`` is the current GPU, or the CPU without one; else as torch names it.
        dtype: of the weights; ``auto`` as they were saved.
        batch_size: completions a forward pass; as many as wait, up to this.
        max_tokens: of prompt and completion together; what the model can read when not given.
        trust_remote_code: run the model code that comes with a hub model.
    """

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
        for setting, value in {"batch_size": batch_size, "max_tokens": max_tokens}.items():
            if value is not None and value < 1:
                raise UserError(
                    f"{setting} must be >= 1, got {value}. Set {setting} in the init_args of "
                    "ScorerReward."
                )
        self.settings = ScorerSettings(
            path=path,
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
        self._alike = _AlikeRows()

    def start(self) -> None:
        """Loads the model, once.

        Raises:
            ValueError: nothing to load, not a scorer, or a setting that does not fit the model.
        """
        self._scorer = load_scorer(self.settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self.name}")

    async def score(self, prompt: Prompt, completion: Completion) -> float | Score:
        if self._scorer is None:
            raise RuntimeError("ScorerReward is not started; call start() of its suite first")
        loop = asyncio.get_running_loop()
        row = _Row(prompt=prompt, completion=completion, result=loop.create_future())
        self._waiting.append(row)
        if self._batching is None or self._batching.done():
            self._batching = loop.create_task(self._score_batches(self._scorer))
        return await row.result

    async def close(self) -> None:
        """Forgets what waits, ends the batch in flight at its next layer and frees the model."""
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
                self._watch(scorer, row, score)

    def _next_batch(self) -> list[_Row]:
        """The longest rows that wait, as rows of like length need little padding."""
        waiting = [row for row in self._waiting if not row.result.done()]
        waiting.sort(key=lambda row: row.num_characters)
        self._waiting = waiting[: -self.batch_size]
        return waiting[-self.batch_size :]

    def _watch(self, scorer: ScorerModel, row: _Row, score: float | Score) -> None:
        if isinstance(score, Score) or not self._alike.add(row, score):
            return
        _log.warning(
            "reward %r gave %d completions in a row the value of another completion of their "
            "prompt, the last one %.6g: without a difference within a group nothing is learned. "
            "Its activation may saturate (set activation: none), its template may not suit the "
            "prompts, or it may know nothing of this task. It read: …%s",
            *(self.name, self._alike.count, score, scorer.end_of_text(row)),
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
class _AlikeRows:
    """Counts the rows since the scorer last told two completions of a prompt apart."""

    count: int = 0
    _first: dict[str, tuple[str, float]] = field(default_factory=dict)

    def add(self, row: _Row, value: float) -> bool:
        """Whether it is time to warn: at 16, 32, 64, … rows alike."""
        text, first = self._first.setdefault(row.prompt.id, (row.completion.text, value))
        if row.completion.text == text:
            return False
        if not math.isclose(value, first, rel_tol=1e-4, abs_tol=1e-6):
            self.count = 0
            self._first.clear()
            return False
        self.count += 1
        return self.count >= MIN_ALIKE_ROWS and self.count.bit_count() == 1
