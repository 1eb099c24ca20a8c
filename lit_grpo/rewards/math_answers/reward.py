"""A reward for right final answers in mathematics.

What is a number is compared exactly and at once; LaTeX goes to math-verify in a worker process
that can be killed. A judge that hangs or crashes is a failure, never a wrong answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_grpo.rewards.math_answers.answers import Answer, compare
from lit_grpo.rewards.math_answers.extraction import STOP_MARKERS, find_answer, read_gold
from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.workers.pool import WorkerError, WorkerPool, check_positive
from lit_grpo.types import Completion, Prompt, UserError

FUNCTIONS = Path(__file__).with_name("worker.py")
MAX_MEMORY_GB = 4.0
"""What math-verify needs beyond it fails in its worker and not in the trainer."""
NUM_SHOWN = 5

_read_gold = lru_cache(maxsize=100_000)(read_gold)


class MathReward(Reward):
    r"""One value for a completion whose final answer equals ``prompt.answer``, another otherwise.

    The final answer is the last ``\boxed{}``, else ``#### x``, else "the answer is x" or
    ``A: x``, else the last number. A completion without an answer, or with one that is not
    mathematics, is wrong: that is the policy's failing. A comparison over the deadline is a
    timeout and a crash an error, and neither has a value.

    Units and the percent sign are dropped (25% is 25, not 0.25); fractions are exact, and their
    decimals match from six places on.

    Args:
        correct: value of a right answer.
        wrong: value of any other.
        deadline_seconds: for one comparison by math-verify.
        num_workers: processes that run math-verify, started when first needed.
        tail_characters: how much of the end of a completion is read.
        stop_markers: where a completion that runs on into a next question is cut.
    """

    def __init__(
        self,
        correct: float = 1.0,
        wrong: float = 0.0,
        deadline_seconds: float = 2.0,
        num_workers: int = 2,
        tail_characters: int = 1000,
        stop_markers: tuple[str, ...] = STOP_MARKERS,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.correct = correct
        self.wrong = wrong
        self.deadline_seconds = deadline_seconds
        self.num_workers = num_workers
        self.tail_characters = tail_characters
        self.stop_markers = tuple(stop_markers)
        check_positive(self, "deadline_seconds", "num_workers", "tail_characters")
        self._pool: WorkerPool | None = None

    def start(self) -> None:
        self._pool = WorkerPool(
            FUNCTIONS,
            ("is_answer", "1"),
            num_workers=self.num_workers,
            deadline_seconds=self.deadline_seconds,
            max_memory_gb=MAX_MEMORY_GB,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        gold = _read_gold(prompt.answer or "")
        if gold is None:
            raise UserError(f"gold answer {prompt.answer!r} of prompt {prompt.id} is not readable")
        answer = find_answer(completion.text, self.stop_markers, self.tail_characters)
        is_right = answer is not None and await self._is_right(gold, answer)
        return self.correct if is_right else self.wrong

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuses golds with which no answer can be compared."""
        golds = {prompt.answer for prompt in prompts}
        readable = await asyncio.gather(*(self._is_readable(gold) for gold in golds))
        unreadable = {gold for gold, ok in zip(golds, readable, strict=True) if not ok}
        bad = [prompt for prompt in prompts if prompt.answer in unreadable]
        if bad:
            shown = ", ".join(f"{prompt.id}: {prompt.answer!r}" for prompt in bad[:NUM_SHOWN])
            raise UserError(
                f"every gold answer must be a number, LaTeX or up to three words, got "
                f"{len(bad)} of {len(prompts)} that are not: {shown}"
                f"{', …' if len(bad) > NUM_SHOWN else ''} (no completion could match them). "
                "Point the answer column at the bare answer, mark it as \\boxed{x} or '#### x', "
                "or drop these rows."
            )

    async def _is_right(self, gold: Answer, answer: Answer) -> bool:
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
        return await self._started_pool().call("is_equal", gold.text, answer.text)

    async def _is_readable(self, gold: str | None) -> bool:
        answer = _read_gold(gold or "")
        if answer is None or answer.kind != "expression":
            return answer is not None
        try:
            return await self._started_pool().call("is_answer", answer.text)
        except (TimeoutError, WorkerError):
            return False

    def _started_pool(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError("MathReward is not started; call start() of its suite first")
        return self._pool
