"""Settings of the terms of the objective: what is refused, and what follows from them."""

import math
import re

import pytest

from lit_grpo.objective.terms import (
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    SamplerCorrection,
    SamplerMask,
    SFTTerm,
)

REFUSED = [
    (KLTerm, {"coef": -0.1}, "kl.coef"),
    (KLTerm, {"coef": math.nan}, "kl.coef"),
    (KLTerm, {"place": "reward", "coef": 0.1, "gradient": "k2"}, "kl.place"),
    (KLTerm, {"place": "reward", "coef": 0.1, "importance": True}, "kl.place"),
    (KLTerm, {"estimator": "k2", "importance": True}, "kl.estimator"),
    (KLTerm, {"coef": 0.1, "refresh_every": 0}, "kl.refresh_every"),
    (KLTerm, {"coef": 0.1, "target": 0.0}, "kl.target"),
    (KLTerm, {"coef": 0.1, "target": 0.1, "horizon": 0}, "kl.horizon"),
    (KLTerm, {"target": 0.1}, "kl.coef"),
    (SamplerMask, {}, "sampler_masks.max"),
    (SamplerMask, {"min": -0.1}, "sampler_masks.min"),
    (SamplerMask, {"min": 2.0, "max": 1.0}, "sampler_masks.max"),
    (SamplerMask, {"statistic": "k2", "min": 0.1, "max": 1.0}, "sampler_masks.min"),
    (CovarianceTerm, {"fraction": 0.0}, "covariance.fraction"),
    (CovarianceTerm, {"low": 5.0, "high": 5.0}, "covariance.high"),
    (CovarianceTerm, {"coef": 0.0}, "covariance.coef"),
    (SFTTerm, {"coef": -0.1}, "sft.coef"),
    (SFTTerm, {"coef": 0.1, "min_reward": math.nan}, "sft.min_reward"),
    (KLTerm, {"refresh_every": 5}, "kl.coef"),
    (KLTerm, {"refresh_mix": 0.5}, "kl.refresh_every"),
    (KLTerm, {"coef": 0.1, "refresh_every": 1, "refresh_mix": 0.0}, "kl.refresh_mix"),
    (KLTerm, {"coef": 0.1, "refresh_every": 1, "refresh_mix": 1.1}, "kl.refresh_mix"),
    (EntropyTerm, {"coef": math.nan}, "entropy.coef"),
    (EntropyTerm, {"target": math.nan}, "entropy.target"),
    (EntropyTerm, {"target": 1.0, "coef": 2.0}, "entropy.coef"),
    (EntropyTerm, {"target": 1.0, "coef": 0.1, "coef_min": 0.2}, "entropy.coef"),
    (EntropyTerm, {"target": 1.0, "coef_min": 2.0}, "entropy.coef_max"),
    (EntropyTerm, {"target": 1.0, "coef_step": 0.0}, "entropy.coef_step"),
    (SamplerCorrection, {"min_ratio": -0.1}, "sampler_correction.min_ratio"),
    (SamplerCorrection, {"max_ratio": 0.0}, "sampler_correction.max_ratio"),
    (SamplerCorrection, {"min_ratio": 2.0, "max_ratio": 2.0}, "sampler_correction.max_ratio"),
    (DistillationTerm, {"coef": -0.1}, "distillation.coef"),
    (DistillationTerm, {"coef": math.nan}, "distillation.coef"),
    (DistillationTerm, {"coef": 1.0, "top_k": 0}, "distillation.top_k"),
]


@pytest.mark.parametrize(("term", "fields", "key"), REFUSED)
def test_an_impossible_value_or_combination_is_refused_with_the_key_to_set(term, fields, key):
    with pytest.raises(ValueError, match=rf"Set model\.objective\.{re.escape(key)}(\.$| to|,)"):
        term(**fields)


@pytest.mark.parametrize(
    ("fields", "in_loss", "in_reward"),
    [
        ({}, False, False),
        ({"coef": 0.1}, True, False),
        ({"coef": 0.1, "place": "reward"}, False, True),
        ({"place": "reward"}, False, False),
    ],
)
def test_a_divergence_is_in_the_loss_or_in_the_reward_if_it_has_a_coefficient(
    fields, in_loss, in_reward
):
    term = KLTerm(**fields)
    assert (term.is_in_loss, term.is_in_reward) == (in_loss, in_reward)


@pytest.mark.parametrize(
    ("fields", "bounds"),
    [
        ({"max": 2.0}, (0.0, 2.0)),
        ({"min": 0.5}, (0.5, math.inf)),
        ({"min": 0.5, "max": 2.0}, (0.5, 2.0)),
    ],
)
def test_a_mask_without_a_bound_keeps_everything_on_that_side(fields, bounds):
    assert SamplerMask(**fields).bounds == bounds


def test_without_a_target_the_bounds_of_the_entropy_coefficient_are_not_looked_at():
    EntropyTerm(coef=2.0, coef_max=1.0)
    EntropyTerm(coef=-0.1)  # a penalty
