"""The policy: a causal language model, its LoRA adapter, its reference, and its logprobs."""

from lit_grpo.policy.lora import LoRA
from lit_grpo.policy.policy import Policy

__all__ = ["LoRA", "Policy"]
