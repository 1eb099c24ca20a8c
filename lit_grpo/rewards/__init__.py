"""Rewards: what a completion is worth, and the suite that asks while others are generated."""

from lit_grpo.rewards._judged import JudgedReward
from lit_grpo.rewards.alignment import RubricAlignmentReward
from lit_grpo.rewards.format import FormatReward
from lit_grpo.rewards.function import FunctionReward
from lit_grpo.rewards.judge import JudgeReward
from lit_grpo.rewards.length import LengthReward
from lit_grpo.rewards.math import MathReward
from lit_grpo.rewards.process import ProcessReward
from lit_grpo.rewards.ranking import RankingReward
from lit_grpo.rewards.reward import OnError, Reward, Value
from lit_grpo.rewards.rubric import RubricReward
from lit_grpo.rewards.scorer import ScorerReward
from lit_grpo.rewards.scoring import RewardFailed, Scoring
from lit_grpo.rewards.suite import RewardSuite

__all__ = [
    "FormatReward",
    "FunctionReward",
    "JudgeReward",
    "JudgedReward",
    "LengthReward",
    "MathReward",
    "OnError",
    "ProcessReward",
    "RankingReward",
    "Reward",
    "RewardFailed",
    "RewardSuite",
    "RubricAlignmentReward",
    "RubricReward",
    "ScorerReward",
    "Scoring",
    "Value",
]
