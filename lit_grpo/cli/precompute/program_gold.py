"""Make gold for verifiable rows: right and wrong answers, each checked by a reward.

A row whose right answers get no higher value than its wrong ones gets a reason instead of gold.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jsonargparse import ArgumentError

from lit_grpo.cli.parsing.parser_errors import explain
from lit_grpo.cli.parsing.strict import StrictParser
from lit_grpo.cli.precompute.perturb import stated, with_answer, wrong_answers
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers
from lit_grpo.cli.prepare.join_gold import Checked, check_key
from lit_grpo.cli.prepare.recipe import Verifier
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.rewards import Reward
from lit_grpo.rewards.math_answers.extraction import gold_texts
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Completion, Prompt, Score, UserError

ROWS_PER_BATCH = 64
NUM_WRONG = 3
"""Wrong answers that a row gets at most."""
NUM_TRIED = 6
"""Wrong answers that are checked at most: some are right by accident."""
SAME_VALUE = "right and wrong answers get the same value"


@dataclass(slots=True)
class Checks:
    """Counts of the rows that were checked."""

    num_scored: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Ids of the rows without gold, by reason."""
    lacks_needed: bool = False
    """Whether one of these is of a source whose rows need gold."""
    lacks_source: bool = False
    """Whether all rows of such a source are without gold."""

    @property
    def num_done(self) -> int:
        return self.num_scored + sum(map(len, self.failures.values()))

    def add_source(self, other: Checks, num_rows: int, is_needed: bool) -> None:
        """Add the counts of a source with this number of rows."""
        num_failed = sum(map(len, other.failures.values()))
        self.lacks_needed |= is_needed and num_failed > 0
        self.lacks_source |= is_needed and 0 < num_rows == num_failed
        self.add(other)

    def add(self, other: Checks) -> None:
        self.num_scored += other.num_scored
        for reason, ids in other.failures.items():
            self.failures.setdefault(reason, []).extend(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    """The answers to a row that are checked."""

    stored: Sequence[str]
    right: Sequence[str]
    wrong: Sequence[str]

    @property
    def texts(self) -> list[str]:
        return [*self.stored, *self.right, *self.wrong]


def check_rows(
    rows: Sequence[PreparedRow],
    verifier: Verifier,
    cache: CheckedAnswers,
    others: Sequence[PreparedRow] = (),
) -> Iterator[Checks]:
    """Check the answers to rows of one source, and record them.

    Args:
        rows: The rows.
        verifier: What says whether an answer is right.
        cache: Where they are recorded.
        others: Further rows of the source, such as those that are recorded already: wrong answers
            are right ones to other rows, which must not depend on what is left to check.

    Yields:
        The results of the rows of each batch.

    Raises:
        UserError: there is no such verifier, or it cannot start.
    """
    answers = {row.columns["answer"] for row in (*rows, *others) if row.columns.get("answer")}
    golds = sorted({_right_answers(one)[0] for one in answers})
    with RewardSuite([load_verifier(verifier)]) as suite:
        for first in range(0, len(rows), ROWS_PER_BATCH):
            yield _check(rows[first : first + ROWS_PER_BATCH], suite, golds, verifier, cache)


def _check(
    rows: Sequence[PreparedRow],
    suite: RewardSuite,
    golds: Sequence[str],
    verifier: Verifier,
    cache: CheckedAnswers,
) -> Checks:
    checks = Checks()
    candidates = []
    for row in rows:
        if row.columns.get("answer") is None:
            checks.failures.setdefault("no gold answer", []).append(row.id)
        else:
            key = check_key(row, verifier)
            candidates.append((row, key, _candidates(row, golds, key)))
    scores = iter(_score(suite, [(row, text) for row, _, one in candidates for text in one.texts]))
    for row, key, one in candidates:
        checked = _choose(one, {text: next(scores) for text in one.texts})
        if isinstance(checked, str):
            checks.failures.setdefault(checked, []).append(row.id)
        else:
            cache.add(key, checked)
            checks.num_scored += 1
    return checks


def unchecked(
    rows: Iterable[PreparedRow], verifier: Verifier, cache: CheckedAnswers
) -> list[PreparedRow]:
    """Return the rows whose answers are not in the cache."""
    return [row for row in rows if cache.get(check_key(row, verifier)) is None]


def load_verifier(verifier: Verifier) -> Reward:
    """Return the reward of a recipe's ``verifier``.

    Raises:
        UserError: there is no such reward, or its settings are wrong.
    """
    settings = {"class_path": verifier} if isinstance(verifier, str) else verifier
    parser = StrictParser(exit_on_error=False)
    parser.add_subclass_arguments(Reward, "verifier")
    try:
        config = parser.instantiate(parser.parse_object({"verifier": settings}))
    except ArgumentError as error:
        raise UserError(explain(parser, str(error), error.__cause__)) from error
    reward: Reward = config.verifier
    return reward


def _candidates(row: PreparedRow, golds: Sequence[str], key: str) -> _Candidates:
    answer, solution = row.columns["answer"], row.columns.get("completion")
    others = random.Random(key).sample(golds, min(NUM_TRIED, len(golds)))
    right = _right_answers(answer)
    wrong = wrong_answers(right, others, key)[:NUM_TRIED]
    worked = [with_answer(solution, right, one) for one in wrong] if solution else []
    return _Candidates(
        stored=row.columns.get("answers") or (),
        right=[*([solution] if solution else []), *map(stated, dict.fromkeys((right[0], answer)))],
        wrong=[*worked, *map(stated, wrong)],
    )


def _right_answers(answer: str) -> list[str]:
    """Return the right answers that a gold answer lists, or the gold answer."""
    return [one for one in gold_texts(answer) if one.strip()] or [answer]


def _score(suite: RewardSuite, texts: Sequence[tuple[PreparedRow, str]]) -> list[Score]:
    if not texts:
        return []
    prompts = [
        Prompt(
            id=row.id,
            text=row.text,
            token_ids=(),
            answer=row.columns["answer"],
            columns=row.columns,
        )
        for row, _ in texts
    ]
    completions = [
        [Completion(token_ids=(), sampler_logprobs=(), text=text, finish_reason="stop")]
        for _, text in texts
    ]
    rollouts = suite.score(prompts, completions)
    (name,) = rollouts.parts
    return [group.scores[name][0] for group in rollouts.groups]


def _choose(candidates: _Candidates, scores: Mapping[str, Score]) -> Checked | str:
    """Return the answers that a row gets, or why it gets none.

    Those that are stored are enough if they differ in value; else they get the better one of the
    right answers and some wrong ones.
    """
    for text in (*candidates.stored, *candidates.right):
        if scores[text].value is None:
            return f"{scores[text].outcome}: {scores[text].detail}"
    values = {text: one.value for text, one in scores.items() if one.value is not None}
    kept = list(candidates.stored)
    if len({values[text] for text in kept}) < 2:
        right = max(candidates.right, key=lambda text: values[text])
        wrong = [one for one in candidates.wrong if values.get(one, values[right]) < values[right]]
        if not wrong:
            return SAME_VALUE
        kept = list(dict.fromkeys([*kept, right, *wrong[:NUM_WRONG]]))
    return Checked(answers=tuple(kept), gold_scores=tuple(values[text] for text in kept))
