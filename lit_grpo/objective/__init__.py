"""The objective: advantages, surrogates, KL estimators, corrections and aggregations.

Each choice is independent of the others and names a pure function in a table.
"""

from lit_grpo.objective.advantages import AdvantageConfig
from lit_grpo.objective.config import EntropyTerm, KLTerm, Objective, SamplerCorrection

__all__ = ["AdvantageConfig", "EntropyTerm", "KLTerm", "Objective", "SamplerCorrection"]
