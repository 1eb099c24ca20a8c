"""A reward on the number of completion tokens alone; it never reads the text."""

from __future__ import annotations

from typing import Any

from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Completion, Prompt, UserError


class LengthReward(Reward):
    """A linear ramp over the completion length, flat on both sides of it.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) is ``start_tokens`` =
    the maximum length less the buffer, ``end_tokens`` = the maximum length, and the default values.
    To reward length instead, set ``end_value`` above ``start_value``.

    Args:
        start_tokens: up to this length the value is ``start_value``.
        end_tokens: from this length on the value is ``end_value``.
        start_value: value of a short completion.
        end_value: value of a long completion.
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
        if not 0 <= start_tokens < end_tokens:
            raise UserError(
                f"start_tokens must be >= 0 and below end_tokens, got {start_tokens} and "
                f"{end_tokens} (the value ramps between them). Set both in the init_args of "
                "LengthReward."
            )
        self.start_tokens = start_tokens
        self.end_tokens = end_tokens
        self.start_value = start_value
        self.end_value = end_value

    def score(self, prompt: Prompt, completion: Completion) -> float:
        excess = len(completion.token_ids) - self.start_tokens
        share = min(1.0, max(0.0, excess / (self.end_tokens - self.start_tokens)))
        return self.start_value + share * (self.end_value - self.start_value)
