"""Engines that turn prompts into completions, and the contract that they share."""

from lit_grpo.rollout._dialect import Launch
from lit_grpo.rollout._proof import Proof
from lit_grpo.rollout._supervision import Supervision
from lit_grpo.rollout.engine import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.hf import HFEngine
from lit_grpo.rollout.sglang import SGLangEngine
from lit_grpo.rollout.vllm import VLLMEngine
from lit_grpo.rollout.vllm_server import VLLMServerEngine

__all__ = [
    "EngineFailed",
    "HFEngine",
    "Launch",
    "Proof",
    "RolloutEngine",
    "SGLangEngine",
    "SampledPolicy",
    "Sampling",
    "Supervision",
    "VLLMEngine",
    "VLLMServerEngine",
]
