"""The finished rows of a rollout as text in a checkpoint, which any ``torch.load`` reads.

Unlike a pickle, the text has nothing but numbers and strings, whatever types a reward has used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lit_grpo.types import Completion, Outcome, Score
from lit_grpo.types.rollouts import ScoredCompletion


def to_text(rows: Mapping[int, ScoredCompletion]) -> str:
    """Return rows as text, every number exact."""
    plain = {
        row: {
            "completion": _fields(one.completion),
            "scores": {name: _fields(score) for name, score in one.scores.items()},
        }
        for row, one in rows.items()
    }
    return json.dumps(plain, default=_plain)


def from_text(text: str) -> dict[int, ScoredCompletion]:
    """Return the rows of a text that `to_text` has made."""
    return {
        int(row): ScoredCompletion(
            completion=_completion(**one["completion"]),
            scores={name: _score(**score) for name, score in one["scores"].items()},
        )
        for row, one in json.loads(text).items()
    }


def _fields(one: Completion | Score) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(one)}


def _plain(value: Any) -> object:
    """Return a number of NumPy or torch as one of Python, and anything else as its words."""
    return value.item() if hasattr(value, "item") else str(value)


def _completion(
    *, token_ids: list[int], sampler_logprobs: list[float], policy_versions: list[int], **more: Any
) -> Completion:
    return Completion(
        token_ids=tuple(token_ids),
        sampler_logprobs=tuple(sampler_logprobs),
        policy_versions=tuple(policy_versions),
        **more,
    )


def _score(*, outcome: str, steps: list[tuple[int, float]], **more: Any) -> Score:
    return Score(
        outcome=Outcome(outcome), steps=tuple((index, value) for index, value in steps), **more
    )
