"""The causes of trouble that a run knows: what each means, what to do, who acts, and when."""

from lit_grpo.diagnostics.causes.cause import Action, Cause
from lit_grpo.diagnostics.causes.machine import MEMORY_ADVICE
from lit_grpo.diagnostics.causes.table import CAUSES, cause_of_exit

__all__ = ["CAUSES", "MEMORY_ADVICE", "Action", "Cause", "cause_of_exit"]
