"""Settings that do nothing are named, with what they need; those that do something are not."""

import logging

import pytest
from small_runs import fit, make_module

from lit_grpo.objective import (
    AdvantageConfig,
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
    SFTTerm,
)
from lit_grpo.training import UpdateConfig
from lit_grpo.training.checks.unused_settings import settings_without_effect


def own(*args):
    raise NotImplementedError


def named(objective=Objective(), advantage=AdvantageConfig(), **update) -> list[str]:  # noqa: B008
    return settings_without_effect(objective, advantage, UpdateConfig(**update))


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        (
            Objective(surrogate="sapo", clip_high=0.3),
            "clip_high has no effect with surrogate: sapo",
        ),
        (
            Objective(surrogate="cispo", clip_low=0.3),
            "clip_low has no effect with surrogate: cispo",
        ),
        (
            Objective(sapo_temperatures=(1.0, 2.0)),
            "sapo_temperatures has no effect with surrogate:",
        ),
        (Objective(vespo_positive=(1.0, 2.0)), "vespo_positive has no effect with surrogate: clip"),
        (Objective(dppo_divergence="kl"), "dppo_divergence has no effect with surrogate: clip"),
        (
            Objective(old_logprobs="sampler", sampler_correction=SamplerCorrection(max_ratio=3.0)),
            "sampler_correction has no effect with old_logprobs: sampler",
        ),
        (Objective(function=own, surrogate="sapo"), "surrogate has no effect with a function"),
        (Objective(function=own, sft=SFTTerm(coef=0.1)), "sft has no effect with a function"),
        (Objective(function=own, entropy=EntropyTerm(coef=0.1)), "entropy has no effect with a fu"),
        (Objective(function=own, off_policy_threshold=0.1), "off_policy_threshold has no effect"),
        (Objective(kl=KLTerm(importance=True)), "kl.importance has no effect with kl.coef: 0"),
        (
            Objective(kl=KLTerm(coef=0.1, horizon=5)),
            "kl.horizon has no effect with kl.target",
        ),
        (Objective(kl=KLTerm(coef=0.1, estimator="k1")), "kl.estimator k1 with kl.place: loss"),
        (Objective(entropy=EntropyTerm(coef_max=0.5)), "entropy.coef_max has no effect with"),
        (Objective(sft=SFTTerm(min_reward=0.5)), "sft.min_reward has no effect with sft.coef: 0"),
        (
            Objective(distillation=DistillationTerm(top_k=8)),
            "distillation.top_k has no effect with distillation.coef: 0",
        ),
        (
            Objective(surrogate="none", ratio="sequence", kl=KLTerm(coef=0.1)),
            "ratio has no effect with surrogate: none",
        ),
        (Objective(covariance=CovarianceTerm(coef=2.0)), "covariance.coef has no effect with"),
        (
            Objective(covariance=CovarianceTerm(action="kl", low=2.0), old_logprobs="sampler"),
            "covariance.low has no effect with covariance.action: kl",
        ),
        (
            Objective(covariance=CovarianceTerm(action="kl")),
            "covariance.action kl has no effect with one update per rollout step",
        ),
    ],
)
def test_a_setting_of_the_objective_without_effect_is_named_with_what_it_needs(objective, key):
    (message,) = named(objective)
    assert message.startswith(f"model.objective.{key}")


def test_a_setting_of_the_advantage_without_effect_is_named():
    (message,) = named(advantage=AdvantageConfig(batch_statistics="tokens"))
    assert message.startswith("model.advantage.batch_statistics has no effect with no baseline")
    (message,) = named(advantage=AdvantageConfig(function=own, rescale=True))
    assert message.startswith("model.advantage.rescale has no effect with a function")


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(clip_high=0.28, clip_low=0.1),
        Objective(surrogate="gmpo", clip_low=0.4),
        Objective(surrogate=own, clip_high=0.28),  # it may read them
        Objective(kl=KLTerm(coef=0.1, estimator="k1", place="reward")),
        Objective(kl=KLTerm(coef=0.1, estimator="k1", gradient="k2")),
        Objective(kl=KLTerm(coef=0.1, estimator="k1"), function=own),  # it may use it rightly
        Objective(kl=KLTerm(coef=0.1, target=0.1, horizon=5)),
    ],
)
def test_settings_with_an_effect_are_not_named(objective):
    assert named(objective) == []


def test_kl_cov_needs_a_second_update():
    assert named(Objective(covariance=CovarianceTerm(action="kl")), minibatches=2) == []


def test_a_run_warns_of_each_once(caplog):
    with caplog.at_level(logging.WARNING):
        fit(make_module(objective=Objective(surrogate="sapo", clip_high=0.3)), max_steps=2)
    messages = [record.message for record in caplog.records if "no effect" in record.message]
    assert messages == ["model.objective.clip_high has no effect with surrogate: sapo."]
