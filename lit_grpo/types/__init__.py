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
    as_rank_lost,
)
from lit_grpo.types.events import RunningStage, Stage, StageProgress, StopReason
from lit_grpo.types.field_types import check_fields, check_init, check_value
from lit_grpo.types.functions import defined_at, unfit_signature, users_traceback
from lit_grpo.types.json_text import parse_json
from lit_grpo.types.plain import changed_settings, import_path, plain_value
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
from lit_grpo.types.saved_state import saved_state
from lit_grpo.types.scores import Measurements, Outcome, Score
from lit_grpo.types.settings import (
    check_range,
    check_type,
    is_http_address,
    list_some,
    setting_error,
)
from lit_grpo.types.tokenizer import Tokenizer, starts_with_bos
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
    "as_rank_lost",
    "changed_settings",
    "check_fields",
    "check_init",
    "check_range",
    "check_type",
    "check_value",
    "counted_rows",
    "defined_at",
    "import_path",
    "is_http_address",
    "list_some",
    "parse_json",
    "plain_value",
    "saved_state",
    "setting_error",
    "starts_with_bos",
    "unfit_signature",
    "users_traceback",
]
