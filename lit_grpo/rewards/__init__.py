"""Rewards: scores of completions. Subclass ``Reward`` to write your own."""

from lit_grpo.rewards.format import FormatReward
from lit_grpo.rewards.functions.reward import FunctionReward
from lit_grpo.rewards.judged.alignment import RubricAlignmentReward
from lit_grpo.rewards.judged.base import JudgedReward
from lit_grpo.rewards.judged.grade import JudgeReward
from lit_grpo.rewards.judged.ranking import RankingReward
from lit_grpo.rewards.judged.rubric import RubricReward
from lit_grpo.rewards.length import LengthReward
from lit_grpo.rewards.math_answers.reward import MathReward
from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.reward_model.reward import ScorerReward
from lit_grpo.rewards.steps import tokens_at
from lit_grpo.rewards.workers.reward import ProcessReward

__all__ = [
    "FormatReward",
    "FunctionReward",
    "JudgeReward",
    "JudgedReward",
    "LengthReward",
    "MathReward",
    "ProcessReward",
    "RankingReward",
    "Reward",
    "RubricAlignmentReward",
    "RubricReward",
    "ScorerReward",
    "tokens_at",
]
