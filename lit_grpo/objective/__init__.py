"""The objective: advantages, surrogates, KL estimators, corrections and aggregations.

Each choice is independent of the others and is a pure function in a table. Nothing here reads a
model or keeps state.
"""

from lit_grpo.objective.advantages import AdvantageConfig
from lit_grpo.objective.config import EntropyTerm, KLTerm, Objective, SamplerCorrection

__all__ = ["AdvantageConfig", "EntropyTerm", "KLTerm", "Objective", "SamplerCorrection"]
