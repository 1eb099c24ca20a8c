"""The coefficients that adapt to a target, from step to step and over a resume."""

import pytest
from small_runs import PROMPTS, fit, make_module, make_trainer

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.objective import EntropyTerm, KLTerm, Objective


def test_a_resumed_run_adapts_on_unless_the_config_has_another_coefficient_or_no_target(tmp_path):
    def make(kl_coef, entropy_coef, target):
        objective = Objective(
            kl=KLTerm(coef=kl_coef, target=target, horizon=64),
            entropy=EntropyTerm(coef=entropy_coef, target=target),
        )
        return make_module(objective=objective)

    trainer = make_trainer(max_steps=2)
    trainer.fit(make(0.1, 0.01, 100.0), PromptLoader(PROMPTS, 4))
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)

    def resumed(*settings):
        module = make(*settings)
        module.allow_changes = True
        trainer = make_trainer(max_steps=2)
        trainer.fit(module, PromptLoader(PROMPTS, 4), ckpt_path=path, weights_only=True)
        coefficients = module.policy_updater.coefficients
        return coefficients.kl.coef, coefficients.entropy.coef

    kl, entropy = resumed(0.1, 0.01, 100.0)
    assert (kl, entropy) != (0.1, 0.01)
    assert resumed(0.1, 0.05, 100.0) == (kl, 0.05)
    assert resumed(0.2, 0.01, 100.0) == (0.2, entropy)
    assert resumed(0.1, 0.01, None) == (0.1, 0.01)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_coefficient_of_the_divergence_follows_it_from_step_to_step(place):
    """The first divergence is 0, below the target: the coefficient falls; then it rises."""
    kl = KLTerm(coef=0.3, place=place, target=1e-6, horizon=64)
    outputs = fit(make_module(objective=Objective(kl=kl)), max_steps=3)
    applied = [output["metrics"]["policy/kl_coef"] for output in outputs]
    assert applied[:2] == pytest.approx([0.3, 0.3 * (1 - 0.2 * 16 / 64)])
    assert applied[2] == pytest.approx(applied[1] * (1 + 0.2 * 16 / 64))
