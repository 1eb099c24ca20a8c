"""A reward for completions that match a regular expression."""

from __future__ import annotations

import re
from typing import Any, Literal

from lit_grpo.rewards.reward import Reward, setting_key
from lit_grpo.types import Completion, Prompt, setting_error
from lit_grpo.types.field_types import checks_types


@checks_types
class FormatReward(Reward):
    """Score a completion by whether it matches a regular expression.

    The expression sees the whole completion, with its reasoning, unless ``reasoning`` is
    ``strip``. An opening tag that the chat template writes is part of the prompt, not of it.

    Args:
        pattern: Regular expression in the syntax of ``re``. Start it with ``(?s)`` to let ``.``
            match line breaks.
        match: Value of a completion that matches.
        mismatch: Value of a completion that does not match.
        mode: ``full`` if the whole text must match, ``search`` if any part of it may.
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
            key = setting_key(self, "pattern")
            raise setting_error(key, "a regular expression", repr(pattern), str(error)) from None
        if mode not in ("full", "search"):
            why = "it says how much of the text must match"
            raise setting_error(setting_key(self, "mode"), "full or search", repr(mode), why)
        self.match = match
        self.mismatch = mismatch
        self._matches = compiled.fullmatch if mode == "full" else compiled.search

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return self.match if self._matches(completion.text) else self.mismatch
