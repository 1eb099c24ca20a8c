"""A reward for the number of completion tokens."""

from __future__ import annotations

from typing import Any

from lit_grpo.rewards.reward import Reward, setting_key
from lit_grpo.types import Completion, Prompt, check_range
from lit_grpo.types.field_types import checks_types


@checks_types
class LengthReward(Reward):
    """Score the completion length by a linear ramp, constant below and above it.

    All tokens count, including the reasoning; with ``reasoning: strip`` only the answer's.

    For the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), set ``start_tokens``
    to the maximum length minus the buffer and ``end_tokens`` to the maximum length, and keep the
    default values. To reward length instead, set ``end_value`` above ``start_value``.

    Args:
        start_tokens: Up to this length, the value is ``start_value``.
        end_tokens: From this length on, the value is ``end_value``.
        start_value: Value of a short completion.
        end_value: Value of a long completion.
    """

    def __init__(
        self,
        start_tokens: int,
        end_tokens: int,
        start_value: float = 0.0,
        end_value: float = -1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range(setting_key(self, "start_tokens"), start_tokens, at_least=0)
        why = "the value changes between start_tokens and end_tokens"
        check_range(setting_key(self, "end_tokens"), end_tokens, above=start_tokens, why=why)
        self.start_tokens = start_tokens
        self.end_tokens = end_tokens
        self.start_value = start_value
        self.end_value = end_value

    def score(self, prompt: Prompt, completion: Completion) -> float:
        excess = len(completion.token_ids) - self.start_tokens
        share = min(1.0, max(0.0, excess / (self.end_tokens - self.start_tokens)))
        return self.start_value + share * (self.end_value - self.start_value)
