"""Rollout engines: prompts to completions. Subclass ``RolloutEngine`` for a new one."""

from lit_grpo.rollout.engine import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.hf.engine import HFEngine
from lit_grpo.rollout.server.api import Launch
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.sglang import SGLangEngine
from lit_grpo.rollout.vllm.in_process import VLLMEngine
from lit_grpo.rollout.vllm.server import VLLMServerEngine
from lit_grpo.rollout.vllm.teacher import VLLMTeacher
from lit_grpo.rollout.weight_check import WeightCheck

__all__ = [
    "EngineFailed",
    "HFEngine",
    "Launch",
    "RolloutEngine",
    "SGLangEngine",
    "SampledPolicy",
    "Sampling",
    "Supervision",
    "VLLMEngine",
    "VLLMServerEngine",
    "VLLMTeacher",
    "WeightCheck",
]
