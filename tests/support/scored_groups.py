"""Score one group of completions with one reward."""

from __future__ import annotations

from typing import Any

from tiny import completion, prompt

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Measurements, Score


def score_group(reward: Reward, *texts: str, **row: Any) -> tuple[list[Score], Measurements]:
    """Return the scores of the texts, and what was measured after the start of the reward."""
    with RewardSuite([reward]) as suite:
        suite.observe()
        batch = suite.score([prompt(**row)], [[completion(text=text) for text in texts]])
        return list(batch.groups[0].scores[reward.name]), suite.observe()[0]
