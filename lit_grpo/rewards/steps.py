"""Find the tokens at which the steps of a completion end, for rewards that value single steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from lit_grpo.types import Completion
from lit_grpo.types.tokenizer import Tokenizer


def tokens_at(completion: Completion, tokenizer: Tokenizer, ends: Sequence[int]) -> list[int]:
    """Return the index of the token at which the text reaches each number of characters.

    Args:
        tokenizer: The policy's.
        ends: Numbers of characters of the completion's text, each at least 1.

    Raises:
        ValueError: an end lies outside the text.
    """
    text, ids = completion.text, completion.token_ids

    def num_characters(count: int) -> int:
        decoded = tokenizer.decode(list(ids[:count]), skip_special_tokens=True)
        return len(decoded.rstrip("\N{REPLACEMENT CHARACTER}"))

    for end in ends:
        if not 1 <= end <= len(text):
            raise ValueError(f"an end must be from 1 to {len(text)} (the characters), got {end}")
    counts = range(1, len(ids) + 1)
    return [min(bisect_left(counts, end, key=num_characters), len(ids) - 1) for end in ends]
