"""The objective in whole rollout steps: the reference, and the KL divergence in the reward."""

import pytest
import torch
from small_runs import (
    PROMPTS,
    fit,
    make_module,
    make_trainer,
    start_weights,
    weights,
)

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import AdvantageConfig, EntropyTerm, KLTerm, Objective
from lit_grpo.policy import LoRA


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_a_refreshed_reference_is_the_policy_of_that_step(lora):
    kl = KLTerm(coef=0.1, refresh_every=2)
    module = make_module(policy={"lora": lora}, objective=Objective(kl=kl))
    divergences = [output["metrics"]["policy/kl"] for output in fit(module, max_steps=4)]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[1] > 1e-6
    assert divergences[2] == pytest.approx(0, abs=1e-6)  # refreshed after two rollout steps
    assert divergences[3] > 1e-6


def test_a_reference_that_is_mixed_is_the_moving_average_of_the_policy():
    kl = KLTerm(coef=0.1, refresh_every=1, refresh_mix=0.25)
    module = make_module(objective=Objective(kl=kl))
    after_steps = []
    refresh = module.refresh_reference

    def record_and_refresh():
        after_steps.append(weights(module))
        refresh()

    module.refresh_reference = record_and_refresh
    fit(module, max_steps=3)
    expected = start_weights()
    for after_step in after_steps:
        expected = {name: 0.75 * expected[name] + 0.25 * after_step[name] for name in expected}
    for name, parameter in module.policy.reference_model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, marks=pytest.mark.slow, id="full"), pytest.param(LoRA(rank=4), id="lora")],
)
def test_a_resumed_run_restores_the_reference_and_the_entropy_coefficient(tmp_path, lora):
    objective = Objective(
        kl=KLTerm(coef=0.1, refresh_every=2, target=1e-4, horizon=64),
        entropy=EntropyTerm(coef=0.01, target=100.0),
    )

    def run(max_steps, ckpt_path=None):
        module = make_module(policy={"lora": lora}, objective=objective)
        trainer = make_trainer(max_steps=max_steps)
        trainer.fit(module, PromptLoader(PROMPTS, 4), ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, _ = run(4)
    _, trainer = run(3)  # the reference is neither the initial nor the current policy
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, _ = run(4, tmp_path / "some.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    assert resumed.policy_updater.coefficients.entropy == whole.policy_updater.coefficients.entropy
    assert resumed.policy_updater.coefficients.kl == whole.policy_updater.coefficients.kl
    assert whole.policy_updater.coefficients.kl.coef != 0.1


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (
            {
                "policy": {"lora": LoRA()},
                "objective": Objective(kl=KLTerm(coef=0.1, refresh_every=1, refresh_mix=0.5)),
            },
            "Set model.objective.kl.refresh_mix to 1",
        ),
        (
            {
                "objective": Objective(kl=KLTerm(coef=0.1, place="reward")),
                "advantage": AdvantageConfig(combine="normalise_then_sum"),
            },
            "Set model.objective.kl.place to loss, or model.advantage.combine",
        ),
        (
            {
                "objective": Objective(kl=KLTerm(coef=0.1, place="reward")),
                "advantage": AdvantageConfig(deviation="mean"),
            },
            "Set model.objective.kl.place to loss",
        ),
    ],
)
def test_choices_that_contradict_each_other_are_refused_when_the_config_is_read(settings, fix):
    with pytest.raises(ValueError, match=fix):
        make_module(**settings)
