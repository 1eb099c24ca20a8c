"""Settings of the objective: their tables, and what is refused with the key to change."""

import math
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from lit_grpo.objective import (
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
    SamplerMask,
    SFTTerm,
)
from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.corrections import LEVELS, OUTSIDE, OVER, STATISTICS
from lit_grpo.objective.kl import KL_ESTIMATORS
from lit_grpo.objective.ratios import RATIOS
from lit_grpo.objective.surrogates import DIVERGENCES, SURROGATES

REFUSED = [
    ({"ratio": "sequence", "surrogate": "dppo"}, "ratio"),
    ({"clip_low": -0.1}, "clip_low"),
    ({"clip_low": 1.1}, "clip_low"),
    ({"clip_low": math.nan}, "clip_low"),
    ({"clip_low": -0.1, "surrogate": "gmpo"}, "clip_low"),
    ({"clip_high": -0.1}, "clip_high"),
    ({"sapo_temperatures": (1.0, 0.0)}, "sapo_temperatures"),
    ({"vespo_positive": (0.0, 1.0)}, "vespo_positive"),
    ({"vespo_negative": (1.0, math.nan)}, "vespo_negative"),
    ({"ratio_cap": 3.0, "surrogate": "sapo"}, "surrogate"),
    ({"ratio_cap": 1.2, "clip_high": 0.2}, "ratio_cap"),
    ({"ratio": "sequence", "surrogate": "gmpo"}, "ratio"),
    ({"ratio": "sequence", "surrogate": "vespo"}, "ratio"),
    (
        {"surrogate": "vespo", "sampler_correction": SamplerCorrection(level="geometric")},
        "sampler_correction.level",
    ),
    ({"surrogate": "none"}, "distillation.coef"),
    ({"surrogate": "none", "kl": KLTerm(coef=0.1, place="reward")}, "distillation.coef"),
    ({"off_policy_threshold": 0.0}, "off_policy_threshold"),
    ({"top_entropy_fraction": 0.0}, "top_entropy_fraction"),
    ({"top_entropy_fraction": 1.1}, "top_entropy_fraction"),
]


@pytest.mark.parametrize(("fields", "key"), REFUSED)
def test_an_impossible_value_or_combination_is_refused_with_the_key_to_set(fields, key):
    with pytest.raises(ValueError, match=rf"Set model\.objective\.{re.escape(key)}(\.$| to|,)"):
        Objective(**fields)


def test_a_value_out_of_range_is_refused_with_rule_value_and_reason():
    with pytest.raises(ValueError, match=r"^objective\.ratio_cap must be > 1\.2, got 1\.1 \("):
        Objective(ratio_cap=1.1, clip_high=0.2)


def test_values_at_their_bounds_are_accepted():
    Objective(clip_low=1.0, clip_high=0.0, top_entropy_fraction=1.0, ratio_cap=1.01)
    Objective(surrogate="gmpo", clip_low=1.5)  # of a logarithm
    SamplerCorrection(min_ratio=0.0, max_ratio=None)
    KLTerm(coef=0.1, refresh_every=1, refresh_mix=1.0)


@pytest.mark.parametrize(
    ("objective", "has_gradient"),
    [
        (Objective(), False),
        (Objective(kl=KLTerm(coef=0.1)), True),
        (Objective(kl=KLTerm(coef=0.1, place="reward")), False),
        (Objective(entropy=EntropyTerm(coef=0.1)), True),
        (Objective(distillation=DistillationTerm(coef=0.1)), True),
        (Objective(surrogate="none", sft=SFTTerm(coef=0.1)), False),
        (Objective(entropy=EntropyTerm(target=1.0)), True),
    ],
)
def test_a_row_of_zero_advantage_has_a_gradient_only_from_kl_and_entropy_in_the_loss(
    objective, has_gradient
):
    assert objective.has_gradient_at_zero_advantage is has_gradient


@pytest.mark.parametrize(
    ("config", "key", "table"),
    [
        (Objective, "surrogate", SURROGATES),
        (Objective, "ratio", RATIOS),
        (Objective, "aggregation", AGGREGATIONS),
        (KLTerm, "estimator", KL_ESTIMATORS),
        (SamplerCorrection, "level", LEVELS),
        (SamplerCorrection, "outside", OUTSIDE),
        (SamplerMask, "statistic", STATISTICS),
        (SamplerMask, "over", OVER),
        (Objective, "dppo_divergence", DIVERGENCES),
    ],
)
def test_a_table_and_the_choices_of_its_key_agree(config, key, table):
    assert set(names_in(get_type_hints(config)[key])) == table.keys()


def names_in(kind: object) -> list[str]:
    """Return the names of a Literal, also of one that is a choice besides your own function."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [name for one in get_args(kind) for name in names_in(one)]
