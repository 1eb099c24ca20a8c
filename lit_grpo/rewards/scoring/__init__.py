"""Score rollout steps: run the rewards while generation goes on, and decide which rows count."""

from lit_grpo.rewards.scoring.reasoning import Reasoning
from lit_grpo.rewards.scoring.scoring import RewardFailed, Scoring
from lit_grpo.rewards.scoring.suite import RewardSuite

__all__ = ["Reasoning", "RewardFailed", "RewardSuite", "Scoring"]
