"""The dataclasses that flow through a rollout step, and the checks of settings.

Shape legend: B prompts per rollout step, G group size, N = B * G completions, P prompt tokens,
C completion tokens, V vocabulary, H hidden size. Row n is completion n % G of prompt n // G.
A mask is True where a token counts.
"""

from lit_grpo.types.errors import (
    Diverged,
    EngineBug,
    EngineFailed,
    OutOfMemory,
    RankCrashed,
    RankLost,
    UserCodeFailed,
    UserError,
)
from lit_grpo.types.events import RunningStage, Stage, StageProgress, StopReason
from lit_grpo.types.field_types import check_fields, check_init, check_value
from lit_grpo.types.rollouts import (
    Completion,
    FinishReason,
    Group,
    GroupResult,
    Message,
    Prompt,
    RewardTable,
    RolloutBatch,
    ScoredCompletion,
    counted_rows,
)
from lit_grpo.types.scores import Measurements, Outcome, Score
from lit_grpo.types.settings import (
    check_range,
    check_type,
    setting_error,
)
from lit_grpo.types.tokenizer import Tokenizer
from lit_grpo.types.train_batch import TokenBatch, TrainBatch

__all__ = [
    "Completion",
    "Diverged",
    "EngineBug",
    "EngineFailed",
    "FinishReason",
    "Group",
    "Measurements",
    "Message",
    "OutOfMemory",
    "Outcome",
    "Prompt",
    "RankCrashed",
    "RankLost",
    "RewardTable",
    "GroupResult",
    "RolloutBatch",
    "RunningStage",
    "Score",
    "ScoredCompletion",
    "Stage",
    "StageProgress",
    "StopReason",
    "TokenBatch",
    "Tokenizer",
    "TrainBatch",
    "UserCodeFailed",
    "UserError",
    "check_fields",
    "check_init",
    "check_range",
    "check_type",
    "check_value",
    "counted_rows",
    "setting_error",
]
