"""The objective: advantages, surrogates, KL estimators, corrections and aggregations.

Each choice is independent of the others and names a pure function in a table.
"""

from lit_grpo.objective.advantages import AdvantageConfig, center
from lit_grpo.objective.config import Objective
from lit_grpo.objective.inputs import LossInputs
from lit_grpo.objective.terms import (
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    SamplerCorrection,
    SamplerMask,
    SFTTerm,
)

__all__ = [
    "AdvantageConfig",
    "CovarianceTerm",
    "DistillationTerm",
    "EntropyTerm",
    "KLTerm",
    "LossInputs",
    "Objective",
    "SFTTerm",
    "SamplerCorrection",
    "SamplerMask",
    "center",
]
