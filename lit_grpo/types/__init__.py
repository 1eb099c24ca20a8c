"""The dataclasses that flow through a rollout step, and the checks of settings.

Shape legend: B prompts per rollout step, G group size, N = B * G completions, P prompt tokens,
C completion tokens, V vocabulary, H hidden size. Row n is completion n % G of prompt n // G.
A mask is True where a token counts.
"""

from lit_grpo.types.errors import (
    EngineFailed,
    RankLost,
    UserCodeFailed,
    UserError,
)
from lit_grpo.types.events import RunningStage, Stage, StageProgress, StopReason
from lit_grpo.types.rollouts import (
    Completion,
    Group,
    Prompt,
    RewardTable,
    RolloutBatch,
)
from lit_grpo.types.scores import Measurements, Outcome, Score
from lit_grpo.types.settings import (
    check_range,
    setting_error,
)
from lit_grpo.types.train_batch import TokenBatch, TrainBatch

__all__ = [
    "Completion",
    "EngineFailed",
    "Group",
    "Measurements",
    "Outcome",
    "Prompt",
    "RankLost",
    "RewardTable",
    "RolloutBatch",
    "RunningStage",
    "Score",
    "Stage",
    "StageProgress",
    "StopReason",
    "TokenBatch",
    "TrainBatch",
    "UserCodeFailed",
    "UserError",
    "check_range",
    "setting_error",
]
