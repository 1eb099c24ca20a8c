"""What the objective refuses when the config is read, each with the key to set."""

import re

import pytest

from lit_grpo.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection

REFUSED = [
    (KLTerm, {"coef": -0.1}, "kl.coef"),
    (KLTerm, {"place": "reward", "coef": 0.1, "gradient": "k2"}, "kl.place"),
    (KLTerm, {"place": "reward", "coef": 0.1, "importance": True}, "kl.place"),
    (KLTerm, {"estimator": "k2", "importance": True}, "kl.estimator"),
    (KLTerm, {"coef": 0.1, "refresh_every": 0}, "kl.refresh_every"),
    (KLTerm, {"refresh_every": 5}, "kl.coef"),
    (KLTerm, {"refresh_mix": 0.5}, "kl.refresh_every"),
    (KLTerm, {"coef": 0.1, "refresh_every": 1, "refresh_mix": 0.0}, "kl.refresh_mix"),
    (KLTerm, {"coef": 0.1, "refresh_every": 1, "refresh_mix": 1.1}, "kl.refresh_mix"),
    (EntropyTerm, {"target": 1.0, "coef": 2.0}, "entropy.coef_max"),
    (EntropyTerm, {"target": 1.0, "coef": 0.1, "coef_min": 0.2}, "entropy.coef_max"),
    (EntropyTerm, {"target": 1.0, "coef_step": 0.0}, "entropy.coef_step"),
    (SamplerCorrection, {"min_ratio": -0.1}, "sampler_correction"),
    (SamplerCorrection, {"max_ratio": 0.0}, "sampler_correction"),
    (SamplerCorrection, {"min_ratio": 2.0, "max_ratio": 2.0}, "sampler_correction"),
    (Objective, {"clip_low": -0.1}, "clip_low"),
    (Objective, {"clip_low": 1.1}, "clip_low"),
    (Objective, {"clip_high": -0.1}, "clip_high"),
    (Objective, {"ratio_cap": 3.0, "surrogate": "sapo"}, "surrogate"),
    (Objective, {"ratio_cap": 1.2, "clip_high": 0.2}, "ratio_cap"),
    (Objective, {"ratio": "sequence", "surrogate": "gmpo"}, "ratio"),
    (Objective, {"ratio": "sequence", "surrogate": "vespo"}, "ratio"),
    (
        Objective,
        {"surrogate": "vespo", "sampler_correction": SamplerCorrection(level="geometric")},
        "sampler_correction.level",
    ),
    (Objective, {"off_policy_threshold": 0.0}, "off_policy_threshold"),
    (Objective, {"top_entropy_fraction": 0.0}, "top_entropy_fraction"),
    (Objective, {"top_entropy_fraction": 1.1}, "top_entropy_fraction"),
]


@pytest.mark.parametrize(("config", "fields", "key"), REFUSED)
def test_an_impossible_value_or_combination_is_refused_with_the_key_to_set(config, fields, key):
    with pytest.raises(ValueError, match=rf"Set model\.objective\.{re.escape(key)}\b"):
        config(**fields)


@pytest.mark.parametrize("name", ["sapo_temperatures", "vespo_positive", "vespo_negative"])
def test_a_temperature_or_exponent_that_is_not_positive_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}.* must be > 0.* Set them in model\.objective"):
        Objective(**{name: (1.0, 0.0)})


def test_bounds_at_their_limits_are_possible():
    Objective(clip_low=1.0, clip_high=0.0, top_entropy_fraction=1.0, ratio_cap=1.01)
    Objective(surrogate="gmpo", clip_low=1.5)  # of a logarithm
    SamplerCorrection(min_ratio=0.0, max_ratio=None)
    KLTerm(coef=0.1, refresh_every=1, refresh_mix=1.0)


@pytest.mark.parametrize(
    ("objective", "moves"),
    [
        (Objective(), False),
        (Objective(kl=KLTerm(coef=0.1)), True),
        (Objective(kl=KLTerm(coef=0.1, place="reward")), False),
        (Objective(entropy=EntropyTerm(coef=0.1)), True),
        (Objective(entropy=EntropyTerm(target=1.0)), True),
    ],
)
def test_a_row_of_no_advantage_moves_the_policy_by_kl_and_entropy_in_the_loss_only(
    objective, moves
):
    assert objective.moves_every_row is moves
