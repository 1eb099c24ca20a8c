"""The objective: surrogates, KL estimators, aggregations, corrections and masks.

Independent choices, each a small function in a table. Nothing here reads a model or keeps state.
"""

from lit_grpo.losses.aggregations import AGGREGATIONS, TokenCounts
from lit_grpo.losses.corrections import entropy_threshold, top_entropy_tokens
from lit_grpo.losses.entropy import EntropyControl
from lit_grpo.losses.kl import KL_ESTIMATORS, kl_in_reward
from lit_grpo.losses.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.losses.surrogates import RATIOS, SURROGATES
from lit_grpo.losses.tokens import TokenLosses, token_losses

__all__ = [
    "AGGREGATIONS",
    "EntropyControl",
    "EntropyTerm",
    "KLTerm",
    "KL_ESTIMATORS",
    "Objective",
    "RATIOS",
    "SURROGATES",
    "SamplerCorrection",
    "TokenCounts",
    "TokenLosses",
    "entropy_threshold",
    "kl_in_reward",
    "token_losses",
    "top_entropy_tokens",
]
