"""What ``lit-grpo judge-check`` does: does the judge answer, and does it tell good from bad?

It asks through the rewards' own scoring, on the data's own prompts, past the judge's cache.
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
from rich.markup import escape
from rich.table import Table

from lit_grpo.diagnostics import shorten
from lit_grpo.judge import Judge
from lit_grpo.judge.connection import base_url, secret_variables
from lit_grpo.rewards import JudgedReward, Reward, RubricAlignmentReward
from lit_grpo.rewards.judged.base import question_of
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.types import Completion, Measurements, Prompt, Score, UserError

NUM_PAIRS = 4
ENOUGH_TOLD_APART = 0.75
"""Of the pairs that were scored; the exit code says whether every reward reaches it."""
NUM_RETRIES = 2
"""At most: who waits at a terminal is told of an outage soon."""

PASSED, FAILED, NO_ACCESS = 0, 1, 2

ReadPrompts = Callable[[], Sequence[Prompt]]
"""The data is read when it is needed, after access is checked."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with an answer that is right and one that is right of another prompt."""

    prompt: Prompt
    good: str
    bad: str


OBVIOUS = (
    ("What is the capital of France?", "Paris", "Oslo"),
    ("What is 12 + 30?", "42", "17"),
    ("Which is heavier, an elephant or a mouse?", "An elephant.", "A mouse."),
    ("Name a primary colour.", "Red", "Wednesday"),
)
"""Question, good answer, bad answer: for data without gold answers."""


def check_judges(rewards: Sequence[Reward], read_prompts: ReadPrompts) -> int:
    """Checks every reward that asks a judge, prints what comes of it, and returns the exit code.

    Returns:
        0 when every judge scores the good answer higher in at least ``ENOUGH_TOLD_APART`` of the
        pairs, 1 when one does not, 2 when one cannot be asked.

    Raises:
        ValueError: no reward asks a judge, or one refuses us, with what to set.
    """
    judged = [reward for reward in rewards if isinstance(reward, JudgedReward)]
    if not judged:
        raise UserError(
            "judge-check needs a reward that asks a judge, and this config has none under "
            "model.rewards or as model.evaluation.accuracy. Set one, such as JudgeReward."
        )
    read_once = cache(read_prompts)
    return max([_check(reward, read_once) for reward in judged])


def _check(reward: JudgedReward, read_prompts: ReadPrompts) -> int:
    console = Console()
    console.print(f"[bold]{reward.name}[/] ({type(reward).__name__})", highlight=False)
    console.print(escape(_place(reward.judge)), soft_wrap=True, highlight=False)
    with RewardSuite([_for_a_check(reward)]) as suite, console.status("asking"):
        _print(console, "first question", suite.observe()[0])
        pairs = _pairs_for(suite, reward, read_prompts)
        scores = _score(suite, pairs) if pairs else []
        observed = suite.observe()[0]
    if not pairs:
        console.print(NO_PAIRS.format(kind=type(reward).__name__), soft_wrap=True)
        return PASSED
    console.print(_table(pairs, scores))
    _print(console, "pairs", observed)
    exit_code, verdict = judge_the_judge(scores)
    console.print(escape(verdict), soft_wrap=True, highlight=False)
    return exit_code


def _for_a_check(reward: JudgedReward) -> JudgedReward:
    """The same reward, asked afresh, soon done, and never ending the check."""
    limits = reward.judge.limits
    brisk = replace(limits, num_retries=min(limits.num_retries, NUM_RETRIES))
    checked = copy.copy(reward)
    checked.judge = replace(reward.judge, cache=None, limits=brisk)
    checked.weight = 1.0
    checked.on_error = "mask"
    return checked


# Pairs


def _pairs_for(
    suite: RewardSuite, reward: JudgedReward, read_prompts: ReadPrompts
) -> Sequence[Pair]:
    """Pairs that the reward can score; none where a good answer is nothing that it knows."""
    if isinstance(reward, RubricAlignmentReward):
        return []
    if pairs := list(islice(gold_pairs(read_prompts()), NUM_PAIRS)):
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
    """Each prompt's gold answer beside the next one of another prompt that differs."""
    answered = [(prompt, prompt.answer) for prompt in prompts if prompt.answer]
    if len({_plain(answer) for _, answer in answered}) < 2:
        return
    for place, (prompt, good) in enumerate(answered):
        others = (answer for _, answer in [*answered[place + 1 :], *answered[:place]])
        bad = next((one for one in others if _plain(one) != _plain(good)), None)
        if bad is not None:
            yield Pair(prompt, good, bad)


def _plain(answer: str) -> str:
    return " ".join(answer.casefold().split())


def _score(suite: RewardSuite, pairs: Sequence[Pair]) -> list[tuple[Score, Score]]:
    """The scores of the good and of the bad answer of each pair."""
    completions = [[_completion(pair.good), _completion(pair.bad)] for pair in pairs]
    rollouts = suite.score([pair.prompt for pair in pairs], completions)
    (name,) = rollouts.parts
    return [(group.scores[name][0], group.scores[name][1]) for group in rollouts.groups]


def _completion(text: str) -> Completion:
    return Completion(token_ids=(), sampler_logprobs=(), text=text, finish_reason="stop")


# Verdicts


def judge_the_judge(scores: Sequence[tuple[Score, Score]]) -> tuple[int, str]:
    """The exit code, and what the scores of the good and the bad answers say of the judge."""
    verdicts = [told_apart(good, bad) for good, bad in scores]
    scored = [verdict for verdict in verdicts if verdict is not None]
    if not scored:
        failed = next(one for pair in scores for one in pair if not one.is_ok)
        return NO_ACCESS, (
            f"The judge scored no pair: {failed.outcome}: {failed.detail}. Look at whether it can "
            "be reached and at model, base_url and limits of the judge."
        )
    told = f"The good answer scored higher in {sum(scored)} of {len(scored)} pairs"
    unscored = len(verdicts) - len(scored)
    told += f" ({unscored} could not be scored)" if unscored else ""
    if sum(scored) >= ENOUGH_TOLD_APART * len(scored):
        return PASSED, f"{told}: the judge tells good from bad."
    return FAILED, (
        f"{told}, and {ENOUGH_TOLD_APART:.0%} would do: the judge does not tell good from bad. "
        "Look at its template, or ask a better model."
    )


def told_apart(good: Score, bad: Score) -> bool | None:
    """Whether the good answer has the higher score; None where one has none."""
    if good.value is None or bad.value is None:
        return None
    return good.value > bad.value


# What is printed

NO_PAIRS = (
    "{kind} scores by columns of its rows, and no answer is known to be good or bad by them: only "
    "access was checked. Try it with lit-grpo rewards."
)
WORDS = {True: "told apart", False: "[bold red]not told apart[/]", None: "[bold red]not scored[/]"}


def _place(judge: Judge) -> str:
    url = urlsplit(base_url(judge))
    address = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    secret = f" from {' or '.join(secret_variables(judge))}" if judge.auth != "none" else ""
    secret = "" if judge.auth == "entra" else secret
    return f"model {judge.model} at {address}, api {judge.api}, auth {judge.auth}{secret}"


def _print(console: Console, what: str, observed: Measurements) -> None:
    """Calls, their latency, tokens and dollars."""
    totals = observed.totals
    latencies = observed.samples.get("timing/judge_api_latency_s") or [0.0]
    p50, p95 = np.percentile(latencies, [50, 95])
    tokens = totals["judge/prompt_tokens"], totals["judge/completion_tokens"]
    console.print(
        f"{what}: calls {totals['judge/calls']:.0f}, latency p50 {p50:.2f} s, p95 {p95:.2f} s, "
        f"{tokens[0]:.0f} tokens read and {tokens[1]:.0f} written, "
        f"{totals['judge/cost_usd']:.4f} dollars",
        soft_wrap=True,
        highlight=False,
    )


def _table(pairs: Sequence[Pair], scores: Sequence[tuple[Score, Score]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("question", "good answer", "bad answer"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    for name in ("good", "bad", "verdict"):
        table.add_column(name, no_wrap=True)
    for pair, (good, bad) in zip(pairs, scores, strict=True):
        texts = (question_of(pair.prompt), pair.good, pair.bad)
        shown = [escape(" ".join(shorten(text).split())) for text in texts]
        table.add_row(*shown, _show(good), _show(bad), WORDS[told_apart(good, bad)])
    return table


def _show(score: Score) -> str:
    return str(score.outcome) if score.value is None else f"{score.value:.3g}"
