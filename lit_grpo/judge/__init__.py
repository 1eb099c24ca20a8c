"""A language model as judge: asked with care, paid once, and silent rather than wrong.

Knows nothing of rewards: it finds verdicts on items, or says why there is none.
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
