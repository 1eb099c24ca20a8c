"""What the objective's choices do to a whole rollout step, on a real run."""

import pytest
import torch
from small_runs import (
    PROMPTS,
    assert_same_runs,
    fit,
    make_module,
    make_trainer,
    start_policy,
    start_weights,
    weights,
)
from tiny import alone

from lit_grpo.data import PromptLoader
from lit_grpo.objective import AdvantageConfig, EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.policy import LoRA


def test_everything_at_once_has_the_same_gradient_for_any_split_into_micro_batches():
    objective = Objective(
        ratio="sequence",
        ratio_cap=3.0,
        kl=KLTerm(coef=0.1, gradient="k2", importance=True),
        entropy=EntropyTerm(coef=0.01, target=100.0),
        sampler_correction=SamplerCorrection(level="geometric", outside="mask"),
        off_policy_threshold=0.5,
        top_entropy_fraction=0.5,
    )
    results = []
    for max_tokens in (1, 60, 100_000):
        module = make_module(
            objective=objective,
            update={"max_tokens_per_micro_batch": max_tokens, "epochs": 2},
        )
        outputs = fit(module, max_steps=2)  # two updates on the same rollouts
        results.append((weights(module), outputs[-1]["metrics"]))
    assert_same_runs(results, rtol=1e-3, atol=1e-5, metrics_atol=1e-4)


def test_the_divergence_is_taken_off_the_reward_before_the_advantages():
    kl = KLTerm(estimator="k1", coef=0.3, place="reward")
    module = make_module(objective=Objective(kl=kl), advantage=AdvantageConfig(deviation="none"))
    _, output = fit(module, max_steps=2)
    batch, rewards = output["batch"], output["rollouts"].rewards
    assert batch.ref_logprobs is None  # nothing of it is in the loss
    start = start_policy()
    with torch.no_grad():
        ref = torch.stack([alone(start.model, batch, n)[0].sum() for n in range(16)])
    penalty = 0.3 * (batch.old_logprobs.sum(1) - ref).double()
    assert penalty.abs().max() > 1e-3
    penalised = rewards - penalty.view(4, 4)
    expected = penalised - penalised.mean(1, keepdim=True)
    got = batch.advantages.view(4, 4).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    per_token = penalty.sum() / 0.3 / batch.loss_mask.sum()
    assert output["metrics"]["policy/kl"] == pytest.approx(per_token.item(), abs=1e-5)


def test_only_the_tokens_of_highest_entropy_have_a_gradient():
    module = make_module(objective=Objective(top_entropy_fraction=0.25))
    (output,) = fit(module)
    batch = output["batch"]
    policy, num_tokens = start_policy(), int(batch.loss_mask.sum())
    rows = [alone(policy.model, batch, n) for n in range(batch.num_rows)]
    logprobs, entropies = zip(*rows, strict=True)
    threshold = torch.cat(entropies).quantile(0.75)
    loss = -sum(
        batch.advantages[n] * (logprobs[n] * (entropies[n] >= threshold)).sum()
        for n in range(batch.num_rows)
    )
    (loss / num_tokens).backward()
    assert output["metrics"]["policy/masked_fraction"] == pytest.approx(0.75, abs=1 / num_tokens)
    for name, parameter in policy.model.named_parameters():
        step = start_weights()[name] - weights(module)[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)


def test_the_entropy_coefficient_rises_while_the_entropy_is_below_its_target():
    term = EntropyTerm(coef=0.01, target=100.0, coef_step=0.004, coef_max=0.016)
    module = make_module(objective=Objective(entropy=term))
    outputs = fit(module, max_steps=4)
    applied = [output["metrics"]["policy/entropy_coef"] for output in outputs]
    # The first step has no entropy before it to compare.
    assert applied == pytest.approx([0.0, 0.014, 0.016, 0.016])
    control = module.updater.entropy_control
    assert control.last_entropy == pytest.approx(outputs[-1]["metrics"]["policy/entropy"])


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_a_refreshed_reference_is_the_policy_of_that_step(lora):
    kl = KLTerm(coef=0.1, refresh_every=2)
    module = make_module(policy={"lora": lora}, objective=Objective(kl=kl))
    divergences = [output["metrics"]["policy/kl"] for output in fit(module, max_steps=4)]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[1] > 1e-6
    assert divergences[2] == pytest.approx(0, abs=1e-6)  # refreshed after two rollout steps
    assert divergences[3] > 1e-6


def test_a_reference_that_follows_is_the_moving_average_of_the_policy():
    kl = KLTerm(coef=0.1, refresh_every=1, refresh_mix=0.25)
    module = make_module(objective=Objective(kl=kl))
    seen = []

    class Weights:
        def __call__(self):
            seen.append(weights(module))

    record = Weights()
    module.refresh_reference, plain = (lambda: (record(), plain())), module.refresh_reference
    fit(module, max_steps=3)
    expected = start_weights()
    for after_step in seen:
        expected = {name: 0.75 * expected[name] + 0.25 * after_step[name] for name in expected}
    for name, parameter in module.policy.reference_model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_reference_and_entropy_coefficient_come_back_with_a_checkpoint(tmp_path, lora):
    objective = Objective(
        kl=KLTerm(coef=0.1, refresh_every=2), entropy=EntropyTerm(coef=0.01, target=100.0)
    )

    def run(max_steps, ckpt_path=None):
        module = make_module(policy={"lora": lora}, objective=objective)
        trainer = make_trainer(max_steps=max_steps)
        trainer.fit(module, PromptLoader(PROMPTS, 4), ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, _ = run(5)
    _, trainer = run(3)  # the reference is neither the start nor the present policy
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    resumed, _ = run(5, tmp_path / "some.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(resumed)[name]), name
    assert resumed.updater.entropy_control == whole.updater.entropy_control


def test_a_completion_far_off_the_policy_is_masked_where_its_advantage_is_negative():
    objective = Objective(off_policy_threshold=1e-4)
    module = make_module(update={"epochs": 4}, objective=objective)
    outputs = fit(module, max_steps=8)
    assert 0 < outputs[-1]["metrics"]["policy/masked_fraction"] < 1


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
            "Set one of them otherwise",
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
