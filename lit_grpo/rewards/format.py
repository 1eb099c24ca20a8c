"""A reward on the shape of a completion by regular expression; it never judges the content."""

from __future__ import annotations

import re
from typing import Any, Literal

from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Completion, Prompt, UserError


class FormatReward(Reward):
    """One value for a completion that matches a regular expression, another for one that doesn't.

    Args:
        pattern: in the syntax of ``re``. Start it with ``(?s)`` to let ``.`` match line breaks.
        match: value of a completion that matches.
        mismatch: value of one that does not.
        mode: ``full`` wants the whole text to match, ``search`` any part of it.
    """

    def __init__(
        self,
        pattern: str,
        match: float = 1.0,
        mismatch: float = 0.0,
        mode: Literal["full", "search"] = "full",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"pattern must be a regular expression, got {pattern!r} ({error}). "
                "Set pattern in the init_args of FormatReward."
            ) from None
        if mode not in ("full", "search"):
            raise UserError(
                f"mode must be full or search, got {mode!r} (it says how much of the text has to "
                "match). Set mode in the init_args of FormatReward."
            )
        self.match = match
        self.mismatch = mismatch
        self._matches = compiled.fullmatch if mode == "full" else compiled.search

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return self.match if self._matches(completion.text) else self.mismatch
