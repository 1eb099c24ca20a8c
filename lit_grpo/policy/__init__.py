"""The policy: a causal language model, its adapter, reference and teacher, and logprobs."""

from lit_grpo.policy.lora import LoRA
from lit_grpo.policy.policy import Policy
from lit_grpo.policy.teacher import LocalTeacher

__all__ = [
    "LoRA",
    "LocalTeacher",
    "Policy",
]
