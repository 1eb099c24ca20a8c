"""Rewards: what a completion is worth, and the suite that asks while others are generated."""

from lit_grpo.rewards.format import FormatReward
from lit_grpo.rewards.function import FunctionReward
from lit_grpo.rewards.length import LengthReward
from lit_grpo.rewards.math import MathReward
from lit_grpo.rewards.reward import OnError, Reward, Value
from lit_grpo.rewards.suite import RewardFailed, RewardSuite, Scoring

__all__ = [
    "FormatReward",
    "FunctionReward",
    "LengthReward",
    "MathReward",
    "OnError",
    "Reward",
    "RewardFailed",
    "RewardSuite",
    "Scoring",
    "Value",
]
