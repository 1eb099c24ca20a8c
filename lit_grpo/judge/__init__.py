"""Ask a language model for verdicts on items, within limits, and read its replies.

Every item gets a verdict or the reason why there is none. Rewards are built on top of this package.
"""

from lit_grpo.judge.config import Judge, Limits, Price
from lit_grpo.judge.examiner import Examiner, Finding, Item
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Grade, Order, Text, Verdict, YesNo
from lit_grpo.judge.template import JudgeTemplate

__all__ = [
    "Examiner",
    "Finding",
    "Form",
    "Grade",
    "Item",
    "Judge",
    "JudgeFailure",
    "JudgeTemplate",
    "Limits",
    "Order",
    "Price",
    "Text",
    "Verdict",
    "YesNo",
]
