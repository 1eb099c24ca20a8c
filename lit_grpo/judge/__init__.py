"""Ask a language model for verdicts on items, within limits, and read its replies.

Every item gets a verdict or the reason why there is none. Rewards are built on top of this package.
"""

from lit_grpo.judge.config import Judge, Limits, Price

__all__ = [
    "Judge",
    "Limits",
    "Price",
]
