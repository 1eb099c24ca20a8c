"""A reward for correct final answers to mathematics problems.

Numbers are compared exactly and at once. LaTeX goes to computer algebra in a worker process, which
may hang or crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from lit_grpo.rewards.math_answers.answers import Answer
from lit_grpo.rewards.math_answers.choices import choice_of
from lit_grpo.rewards.math_answers.equality import are_equal, formulas_of
from lit_grpo.rewards.math_answers.extraction import (
    NULL_GOLDS,
    STOP_MARKERS,
    find_answer,
    find_choice,
    gold_texts,
    read_golds,
)
from lit_grpo.rewards.reward import Reward, setting_key, started
from lit_grpo.rewards.workers.pool import WorkerError, WorkerPool
from lit_grpo.types import Completion, Prompt, UserError, check_range
from lit_grpo.types.field_types import checks_types

FUNCTIONS = Path(__file__).with_name("worker.py")
MAX_MEMORY_GB = 4.0
"""Memory limit of a worker: a larger allocation by math-verify fails there."""
NUM_SHOWN = 5

_read_golds = lru_cache(maxsize=100_000)(read_golds)


@checks_types
class MathReward(Reward):
    r"""Score a completion by whether its final answer equals ``prompt.answer``, or one of its list.

    The final answer is in the last ``<answer>`` or ``\boxed{}``, else it follows the last
    ``####``, "the answer is" or ``A:``, else it is the last formula or number, or the whole of a
    completion of up to three words. Operands of a calculation without its result are no answer. A
    completion that is nothing but its gold answer is right. One without an answer, or with one that
    cannot be read (in time), is wrong. A comparison of readable answers that exceeds the deadline
    is a timeout, a lost worker is an error, and neither has a value.

    Only the answer after the policy's reasoning is read, unless ``reasoning`` is ``keep``: a
    completion that is cut off in its reasoning has none.

    If the gold answer is the letter of a choice, A to J, an answer may name it in brackets, with
    what it stands for or after a word: "(B)", "B) Paris", "option B".

    A gold answer that is a list of texts or numbers lists right answers, of which one is enough.

    Units and percent signs are dropped (25% is 25, not 0.25). Fractions are exact; a decimal equals
    a repeating fraction if it is right to six places.

    Args:
        correct: Value of a correct answer.
        wrong: Value of any other completion.
        deadline_seconds: Timeout of one comparison of formulas.
        num_workers: Number of processes for formulas, started when they are needed.
        tail_characters: Number of characters at the end of a completion in which a formula or
            number is the answer without a mark.
        stop_markers: Texts that start a next question; what follows them is ignored if there is a
            marked answer before.
    """

    reasoning = "strip"

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
        check_range(setting_key(self, "deadline_seconds"), deadline_seconds, above=0)
        check_range(setting_key(self, "num_workers"), num_workers, at_least=1)
        check_range(setting_key(self, "tail_characters"), tail_characters, at_least=1)
        self._pool: WorkerPool | None = None

    def start(self) -> None:
        self._pool = WorkerPool(
            FUNCTIONS,
            ("is_readable", "1"),
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
        golds = _read_golds(prompt.answer or "")
        if None in golds:
            raise ValueError(f"gold answer {prompt.answer!r} of prompt {prompt.id} is not readable")
        if _bare(completion.text) in _bare_golds(prompt.answer or ""):
            return self.correct  # also a name that would be read as a formula, such as UK or H2O
        choices = _choices(prompt.answer or "")
        if choices and find_choice(completion.text, self.stop_markers) in choices:
            return self.correct
        answer = find_answer(completion.text, self.stop_markers, self.tail_characters)
        is_right = answer is not None and await self._is_one_of(
            cast(Sequence[Answer], golds), answer
        )
        return self.correct if is_right else self.wrong

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that every gold answer can be compared with answers.

        Raises:
            UserError: some gold answers are missing, sentences or not parsed by math-verify.
        """
        golds = {prompt.answer for prompt in prompts}
        readable = await asyncio.gather(
            *(self._are_readable(_read_golds(gold or "")) for gold in golds)
        )
        unreadable = {gold for gold, ok in zip(golds, readable, strict=True) if not ok}
        bad = [prompt for prompt in prompts if prompt.answer in unreadable]
        if bad:
            shown = ", ".join(f"{prompt.id}: {prompt.answer!r}" for prompt in bad[:NUM_SHOWN])
            raise UserError(
                "every gold answer must be a number, LaTeX or up to three words, or a list of "
                f"these, got {len(bad)} of {len(prompts)} that are not: {shown}"
                f"{', …' if len(bad) > NUM_SHOWN else ''} (no completion could match them). "
                "Point the answer column at the bare answer, mark it as \\boxed{x} or '#### x', "
                f"or drop these rows.{_about_placeholders(bad)}"
            )

    async def _is_one_of(self, golds: Sequence[Answer], answer: Answer) -> bool:
        failure: Exception | None = None
        for gold in golds:
            try:
                if await self._is_right(gold, answer):
                    return True
            except (TimeoutError, WorkerError) as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    async def _is_right(self, gold: Answer, answer: Answer) -> bool:
        try:
            return await are_equal(gold, answer, self._call)
        except TimeoutError:
            # It is the completion's fault if the gold answer can be read in time and it cannot.
            if await self._is_readable(gold) and not await self._is_readable(answer):
                return False
            raise

    async def _are_readable(self, golds: Sequence[Answer | None]) -> bool:
        return all([await self._is_readable(gold) for gold in golds])

    async def _is_readable(self, answer: Answer | None) -> bool:
        """Return whether all formulas of an answer can be parsed and computed in time."""
        if answer is None or answer.kind != "expression":
            return answer is not None
        for formula in formulas_of(answer):
            if formula is None:
                return False
            if formula.kind == "expression":
                try:
                    if not await self._call("is_readable", formula.text):
                        return False
                except (TimeoutError, WorkerError):
                    return False
        return True

    async def _call(self, name: str, *texts: str) -> bool:
        return cast(bool, await started(self._pool, self).call(name, *texts))


@lru_cache(maxsize=100_000)
def _bare_golds(text: str) -> frozenset[str]:
    return frozenset(map(_bare, gold_texts(text)))


@lru_cache(maxsize=100_000)
def _choices(text: str) -> frozenset[str]:
    """Return the letters of the gold answers that are choices, such as "(B)"."""
    letters = (choice_of(gold.text) for gold in _read_golds(text) if gold is not None)
    return frozenset(letter for letter in letters if letter)


def _bare(text: str) -> str:
    return text.strip().removesuffix(".")


def _about_placeholders(bad: Sequence[Prompt]) -> str:
    """Return why a placeholder for a missing answer is refused, and how to keep it."""
    found = sorted({prompt.answer.strip() for prompt in bad if prompt.answer} & NULL_GOLDS)
    if not found:
        return ""
    return (
        f" {' and '.join(map(repr, found))} count as missing, which is what tools write for no "
        f"answer: where it is the answer, write \\boxed{{{found[0]}}}."
    )
