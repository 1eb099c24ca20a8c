"""Rollout engines: where completions come from."""

from lit_grpo.rollout.engine import RolloutEngine, Sampling
from lit_grpo.rollout.hf import HFEngine

__all__ = ["HFEngine", "RolloutEngine", "Sampling"]
