"""Known causes of trouble: what each means, what to do, and what the run does about it."""

from lit_grpo.diagnostics.causes.cause import Action, Cause
from lit_grpo.diagnostics.causes.machine import MEMORY_ADVICE
from lit_grpo.diagnostics.causes.table import CAUSES, cause_of_exit

__all__ = ["CAUSES", "MEMORY_ADVICE", "Action", "Cause", "cause_of_exit"]
