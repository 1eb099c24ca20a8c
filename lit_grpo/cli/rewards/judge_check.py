"""Run ``lit-grpo judge-check``: check that a judge answers, and tells good answers from bad ones.

The judge is called by the rewards' own scoring, with prompts of the data and without its cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_grpo.diagnostics.absent_scores import advice_on
from lit_grpo.judge import Judge
from lit_grpo.judge.connection import base_url, secret_variables
from lit_grpo.rewards import JudgedReward, Reward, RubricAlignmentReward
from lit_grpo.rewards.judged.base import question_of
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.runs.tables import TextTail, add_numbers, make_table, open_console
from lit_grpo.types import Completion, Measurements, Prompt, Score, UserError
from lit_grpo.types.text import shorten

NUM_PAIRS = 4
MIN_PAIRS = 8
"""Fewer may be told apart by chance."""
MIN_CORRECT_FRACTION = 0.75
"""A judge passes if it scores the good answer higher in this share of the scored pairs."""
MAX_RETRIES = 2
"""Fewer than in training, so an outage is reported soon."""

NO_PAIRS = (
    "Only access was checked: {kind} depends on columns of the data, so there are no known good "
    "and bad answers to compare. Try it with lit-grpo rewards."
)
VERDICTS = {
    True: Text("told apart"),
    False: Text("not told apart", style="bold red"),
    None: Text("not scored", style="bold red"),
}

PASSED, FAILED, NO_ACCESS = 0, 1, 2
"""Exit codes of this command; the highest of all judges counts."""

ReadPrompts = Callable[[], Sequence[Prompt]]
"""Reads the data, which is needed only after access has been checked."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with its gold answer and the gold answer of another prompt."""

    prompt: Prompt
    good: str
    bad: str


OBVIOUS = (
    ("What is the capital of France?", "Paris", "Oslo"),
    ("What is 12 + 30?", "42", "17"),
    ("Which is heavier, an elephant or a mouse?", "An elephant.", "A mouse."),
    ("Name a primary colour.", "Red", "Wednesday"),
)
"""Question, good answer and bad answer, for data without gold answers."""


def check_judges(rewards: Sequence[Reward], read_prompts: ReadPrompts) -> int:
    """Check every reward that asks a judge, print the results, and return the exit code.

    Returns:
        0 if every judge scores the good answer higher in at least ``MIN_CORRECT_FRACTION`` of the
        pairs, 1 if one does not, 2 if one cannot be asked.

    Raises:
        UserError: no reward asks a judge, or a judge refuses access; the message says what to set.
    """
    judged = [reward for reward in rewards if isinstance(reward, JudgedReward)]
    if not judged:
        raise UserError(
            "judge-check needs a reward that asks a judge, and this config has none under "
            "model.rewards or as model.evaluation.accuracy. Set one, such as JudgeReward."
        )
    read_once = cache(read_prompts)
    return max([_check(reward, read_once) for reward in judged])


def verdict_on(reward: JudgedReward, read_prompts: ReadPrompts) -> tuple[int, str]:
    """Check a reward like `check_judges`; return its exit code and a sentence.

    Raises:
        UserError: the judge refuses access.
    """
    with RewardSuite([_for_check(reward)]) as suite:
        pairs = _pairs_for(suite, reward, read_prompts)
        if not pairs:
            return PASSED, NO_PAIRS.format(kind=type(reward).__name__)
        return assess(_score(suite, pairs))


def _check(reward: JudgedReward, read_prompts: ReadPrompts) -> int:
    console = open_console()
    console.print(Text.assemble((reward.name, "bold"), f" ({type(reward).__name__})"))
    console.print(address_of(reward.judge), soft_wrap=True)
    with RewardSuite([_for_check(reward)]) as suite, console.status("asking"):
        _print_calls(console, "first question", suite.observe()[0])
        pairs = _pairs_for(suite, reward, read_prompts)
        scores = _score(suite, pairs) if pairs else []
        measurements = suite.observe()[0]
    if not pairs:
        console.print(NO_PAIRS.format(kind=type(reward).__name__), soft_wrap=True)
        return PASSED
    console.print(_table(pairs, scores))
    _print_calls(console, "pairs", measurements)
    exit_code, verdict = assess(scores)
    console.print(verdict, soft_wrap=True)
    return exit_code


def _for_check(reward: JudgedReward) -> JudgedReward:
    """Return a copy for all sources, without a cache, with few retries and ``on_error: mask``."""
    limits = reward.judge.limits
    quick = replace(limits, num_retries=min(limits.num_retries, MAX_RETRIES))
    checked = copy.copy(reward)
    checked.judge = replace(reward.judge, cache=None, limits=quick)
    checked.weight = 1.0
    checked.on_error = "mask"
    checked.only_sources = None  # the obvious pairs are of no source
    return checked


def _pairs_for(
    suite: RewardSuite, reward: JudgedReward, read_prompts: ReadPrompts
) -> Sequence[Pair]:
    """Return pairs that the reward can score; none if no good answers are known."""
    if isinstance(reward, RubricAlignmentReward):
        return []
    if pairs := list(islice(gold_pairs(reward.applicable_prompts(read_prompts())), NUM_PAIRS)):
        return pairs
    pairs = [
        Pair(Prompt(id=question, text=question, token_ids=(), columns={}), good, bad)
        for question, good, bad in OBVIOUS
    ]
    try:
        suite.check([pair.prompt for pair in pairs])
    except ValueError:
        return []
    return pairs


def gold_pairs(prompts: Sequence[Prompt]) -> Iterator[Pair]:
    """Yield each prompt with its gold answer and the next different gold answer."""
    answered = [(prompt, prompt.answer) for prompt in prompts if prompt.answer]
    if len({_normalise(answer) for _, answer in answered}) < 2:
        return
    for index, (prompt, good) in enumerate(answered):
        others = (answer for _, answer in [*answered[index + 1 :], *answered[:index]])
        bad = next((one for one in others if _normalise(one) != _normalise(good)), None)
        if bad is not None:
            yield Pair(prompt, good, bad)


def _normalise(answer: str) -> str:
    return " ".join(answer.casefold().split())


def _score(suite: RewardSuite, pairs: Sequence[Pair]) -> list[tuple[Score, Score]]:
    """Return the scores of the good and of the bad answer of each pair."""
    completions = [[_completion(pair.good), _completion(pair.bad)] for pair in pairs]
    rollouts = suite.score([pair.prompt for pair in pairs], completions)
    (name,) = rollouts.parts
    return [(group.scores[name][0], group.scores[name][1]) for group in rollouts.groups]


def _completion(text: str) -> Completion:
    return Completion(token_ids=(), sampler_logprobs=(), text=text, finish_reason="stop")


def assess(scores: Sequence[tuple[Score, Score]]) -> tuple[int, str]:
    """Return the exit code and a sentence, from the scores of good and bad answers."""
    verdicts = [told_apart(good, bad) for good, bad in scores]
    scored = [verdict for verdict in verdicts if verdict is not None]
    if not scored:
        failed = next(one for pair in scores for one in pair if not one.is_ok)
        return NO_ACCESS, (
            f"The judge scored no pair: {failed.outcome}: {failed.detail}. "
            f"{advice_on(failed.outcome, is_bug=bool(failed.bug))}."
        )
    counts = f"The good answer scored higher in {sum(scored)} of {len(scored)} pairs"
    unscored = len(verdicts) - len(scored)
    counts += f" ({unscored} could not be scored)" if unscored else ""
    if sum(scored) >= MIN_CORRECT_FRACTION * len(scored):
        few = ", as far as so few pairs can show" if len(scored) < MIN_PAIRS else ""
        return PASSED, f"{counts}: the judge tells good from bad{few}."
    return FAILED, (
        f"{counts}, and {MIN_CORRECT_FRACTION:.0%} are required: the judge does not tell good from "
        "bad. Improve its template or use a better model."
    )


def told_apart(good: Score, bad: Score) -> bool | None:
    """Return whether the good answer has the higher score; None if one of them has no score."""
    if good.value is None or bad.value is None:
        return None
    return good.value > bad.value


def address_of(judge: Judge) -> str:
    """Return which model is asked where, and which variables hold the key."""
    url = urlsplit(base_url(judge))
    address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    secret = f" from {' or '.join(secret_variables(judge))}" if judge.auth != "none" else ""
    secret = "" if judge.auth == "entra" else secret
    return f"model {judge.model} at {address}, api {judge.api}, auth {judge.auth}{secret}"


def _print_calls(console: Console, what: str, measurements: Measurements) -> None:
    """Print the number of calls, their latency, tokens and dollars."""
    totals = measurements.totals
    latencies = measurements.samples.get("timing/judge_api_latency_s") or [0.0]
    p50, p95 = np.percentile(latencies, [50, 95])
    tokens = totals["judge/prompt_tokens"], totals["judge/completion_tokens"]
    console.print(
        f"{what}: calls {totals['judge/calls']:.0f}, latency p50 {p50:.2f} s, p95 {p95:.2f} s, "
        f"{tokens[0]:.0f} tokens read and {tokens[1]:.0f} written, "
        f"{totals['judge/cost_usd']:.4f} dollars",
        soft_wrap=True,
    )


def _table(pairs: Sequence[Pair], scores: Sequence[tuple[Score, Score]]) -> Table:
    table = make_table("question")
    for name in ("good answer", "bad answer"):
        table.add_column(name)
    add_numbers(table, "good", "bad", "verdict")
    for pair, (good, bad) in zip(pairs, scores, strict=True):
        texts = (question_of(pair.prompt), pair.good, pair.bad)
        shown = [TextTail(shorten(text)) for text in texts]
        table.add_row(*shown, _show(good), _show(bad), VERDICTS[told_apart(good, bad)])
    return table


def _show(score: Score) -> str:
    return str(score.outcome) if score.value is None else f"{score.value:.3g}"
