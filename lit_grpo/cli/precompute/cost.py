"""Estimate the calls, tokens, dollars and hours of missing votes, without a call.

Tokens are estimated from the prompts of a sample of the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_grpo.cli.precompute.votes import VoteCall
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.judge.client import CHARACTERS_PER_TOKEN, FIRST_REPLY_TOKENS
from lit_grpo.judge.estimate import seconds_of_calls

SAMPLE = 1000
"""Calls, at most, whose prompts are written to estimate their tokens."""
SECONDS_PER_CALL = 2.0
"""Assumed duration of a call."""
NONCE = "0" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """The estimated cost of some calls."""

    num_calls: int
    num_votes: int
    prompt_tokens: float
    reply_tokens: float
    dollars: float | None
    """None if the judge has no price."""
    seconds: float
    """Within the judge's limits, at `SECONDS_PER_CALL` each."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": self.num_calls,
            "votes": self.num_votes,
            "prompt_tokens": round(self.prompt_tokens),
            "reply_tokens": round(self.reply_tokens),
            "dollars": None if self.dollars is None else round(self.dollars, 4),
            "hours": round(self.seconds / 3600, 4),
        }


def estimate(calls: Iterable[VoteCall], scorer: Scorer) -> CostEstimate:
    """Return what calls will take."""
    num_calls = num_votes = 0
    sample: list[VoteCall] = []
    stride = 1
    for call in calls:
        if num_calls % stride == 0:
            sample.append(call)
        if len(sample) > SAMPLE:
            sample, stride = sample[::2], 2 * stride
        num_calls += 1
        num_votes += len(call.answers)
    factor = num_calls / len(sample) if sample else 0.0
    prompt_tokens = factor * sum(_prompt_tokens(call, scorer) for call in sample)
    reply = min(FIRST_REPLY_TOKENS, scorer.judge.max_completion_tokens)
    reply_tokens = float(num_votes * reply)
    price = scorer.judge.price
    dollars = None
    if price is not None:
        dollars = (prompt_tokens * price.prompt + reply_tokens * price.completion) / 1e6
    return CostEstimate(
        num_calls=num_calls,
        num_votes=num_votes,
        prompt_tokens=prompt_tokens,
        reply_tokens=reply_tokens,
        dollars=dollars,
        seconds=seconds_of_calls(
            scorer.judge.limits, num_calls, prompt_tokens + reply_tokens, SECONDS_PER_CALL
        ),
    )


def _prompt_tokens(call: VoteCall, scorer: Scorer) -> float:
    items: list[Mapping[str, Any]] = [
        {"answer": answer, "id": str(place)} for place, answer in enumerate(call.answers.values())
    ]
    form = scorer.form.instructions(len(items))
    values = {**call.context, "items": items, "nonce": NONCE, "reply_form": form}
    messages = scorer.template.render(values)
    return sum(len(one["content"]) for one in messages) / CHARACTERS_PER_TOKEN
