import re

import lightning as L
import pytest
import torch
from small_runs import (
    assert_same_runs,
    fit,
    make_module,
    start_policy,
    start_weights,
    weights,
)
from tiny import unbatched_logprobs

from lit_grpo.callbacks import Checkpoints
from lit_grpo.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.rewards import Reward
from lit_grpo.rollout import Sampling
from lit_grpo.runs.checkpoints.files import read_manifest
from lit_grpo.stopping import ExitCode, get_stop_reason


class CountRows(L.Callback):
    """Count the rows that go through the model in updates."""

    def __init__(self):
        self.num_rows = 0

    def on_stage_end(self, trainer, pl_module, stage):
        if stage.name == "micro_batch":
            self.num_rows += stage.details["rows"]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
def test_the_gradient_is_the_same_for_any_split_into_micro_batches(aggregation):
    objective = Objective(
        aggregation=aggregation, kl=KLTerm(coef=0.1), entropy=EntropyTerm(coef=0.01)
    )
    runs = fit_with_splits(objective)
    assert_same_runs(runs, rtol=1e-4, atol=1e-6, metrics_atol=1e-5)


def fit_with_splits(objective, **update):
    """Return weights and last metrics of runs with micro-batches of one row, some and all."""
    runs = []
    for max_tokens in (1, 60, 100_000):
        module = make_module(
            objective=objective, update={"max_tokens_per_micro_batch": max_tokens} | update
        )
        outputs = fit(module, max_steps=module.update.optimizer_steps)
        runs.append((weights(module), outputs[-1]["metrics"]))
    return runs


def test_all_terms_together_have_the_same_gradient_for_any_split_into_micro_batches():
    objective = Objective(
        ratio="sequence",
        ratio_cap=3.0,
        kl=KLTerm(coef=0.1, gradient="k2", importance=True),
        entropy=EntropyTerm(coef=0.01, target=100.0),
        sampler_correction=SamplerCorrection(level="geometric", outside="mask"),
        off_policy_threshold=0.5,
        top_entropy_fraction=0.5,
    )
    runs = fit_with_splits(objective, epochs=2)
    assert_same_runs(runs, rtol=1e-3, atol=1e-5, metrics_atol=1e-4)


def test_rows_without_advantage_skip_the_model_and_the_gradient_is_the_same():
    class FirstGroupOnly(Reward):
        def score(self, prompt, completion):
            return float(completion.token_ids[0] < 128) if prompt.id == "1+1=" else 1.0

    results = []
    # A bonus this small makes every row run, and changes nothing else.
    for entropy_coef, num_rows in ((0.0, 4), (1e-30, 16)):
        counter = CountRows()
        module = make_module(
            rewards=[FirstGroupOnly()], objective=Objective(entropy=EntropyTerm(coef=entropy_coef))
        )
        outputs = fit(module, callbacks=[counter])
        results.append(weights(module))
        assert counter.num_rows == num_rows
        assert outputs[0]["metrics"]["policy/grad_norm"] > 0
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


def test_a_step_whose_advantages_are_all_zero_has_no_gradient_and_no_metrics_of_tokens():
    class Same(Reward):
        def score(self, prompt, completion):
            return 0.5

    module = make_module(
        rewards=[Same()], update={"epochs": 2}, objective=Objective(sampler_correction=None)
    )
    (output,) = fit(module, max_steps=2)
    assert module.global_step == 2
    assert output["metrics"]["policy/grad_norm"] == 0.0
    assert output["metrics"]["reward/frac_zero_std"] == 1.0
    assert "policy/ratio_mean" not in output["metrics"]
    assert "sampler/logprob_difference_max" not in output["metrics"]
    torch.testing.assert_close(weights(module), start_weights(), rtol=0, atol=0)


def test_the_sampling_temperature_applies_to_the_trained_logprobs():
    module = make_module(sampling=Sampling(max_tokens=8, temperature=0.5))
    (output,) = fit(module)
    assert output["metrics"]["sampler/logprob_difference_max"] < 1e-4


def test_one_update_per_rollout_step_needs_no_old_logprobs_and_has_ratio_one():
    (output,) = fit(make_module())
    assert output["batch"].old_logprobs is None
    assert output["metrics"]["policy/ratio_mean"] == 1.0
    assert "policy/kl" not in output["metrics"]


def test_several_updates_per_rollout_step_use_the_logprobs_of_the_old_policy():
    module = make_module(
        update={"epochs": 2, "minibatches": 2}, objective=Objective(kl=KLTerm(coef=0.1))
    )
    outputs = fit(module, max_steps=8)
    assert len(outputs) == 2  # rollout steps
    assert module.global_step == 8
    assert module.rollout_step == 2
    metrics = outputs[0]["metrics"]
    assert outputs[0]["batch"].old_logprobs is not None
    assert metrics["policy/ratio_mean"] != 1.0
    assert metrics["policy/kl"] > 0


def test_the_gradient_is_scaled_down_to_max_grad_norm():
    free = make_module()
    (output,) = fit(free)
    norm = output["metrics"]["policy/grad_norm"]
    clipped = make_module(update={"max_grad_norm": norm / 4})
    fit(clipped)
    whole, scaled = weights(free), weights(clipped)
    for name, start in start_weights().items():
        expected = (whole[name] - start) / 4
        torch.testing.assert_close(scaled[name] - start, expected, rtol=1e-2, atol=1e-6)


def test_a_gradient_that_is_not_finite_never_reaches_the_policy():
    module = make_module()

    class Poison(L.Callback):
        def on_stage_end(self, trainer, pl_module, stage):
            if stage.name == "micro_batch":
                next(pl_module.parameters()).grad.fill_(float("nan"))

    fit(module, callbacks=[Poison()])
    assert "They were not applied" in get_stop_reason(module.trainer).message
    torch.testing.assert_close(weights(module), start_weights(), rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_names_the_functions_of_the_user():
    calls = []

    def fails_later(inputs, objective):
        calls.append(0)
        return inputs.log_ratio * (float("nan") if len(calls) > 1 else 1.0)

    module = make_module(objective=Objective(surrogate=fails_later))
    fit(module, max_steps=2)
    message = get_stop_reason(module.trainer).message
    assert re.search("First check what .*fails_later .* returned", message)


def test_only_the_tokens_of_highest_entropy_have_a_gradient():
    module = make_module(objective=Objective(top_entropy_fraction=0.25))
    (output,) = fit(module)
    batch = output["batch"]
    policy, before = start_policy(), start_weights()
    num_tokens = int(batch.loss_mask.sum())
    rows = [unbatched_logprobs(policy.model, batch, n) for n in range(batch.num_rows)]
    logprobs, entropies = zip(*rows, strict=True)
    threshold = torch.cat(entropies).quantile(0.75)
    loss = -sum(
        batch.advantages[n] * (logprobs[n] * (entropies[n] >= threshold)).sum()
        for n in range(batch.num_rows)
    )
    (loss / num_tokens).backward()
    assert output["metrics"]["policy/masked_fraction"] == pytest.approx(0.75, abs=1 / num_tokens)
    after = weights(module)
    for name, parameter in policy.model.named_parameters():
        step = before[name] - after[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)


def test_the_entropy_coefficient_rises_while_the_entropy_is_below_its_target():
    term = EntropyTerm(coef=0.01, target=100.0, coef_step=0.004, coef_max=0.016)
    module = make_module(objective=Objective(entropy=term))
    outputs = fit(module, max_steps=4)
    applied = [output["metrics"]["policy/entropy_coef"] for output in outputs]
    # At the first step there is no entropy to compare with the target.
    assert applied == pytest.approx([0.0, 0.014, 0.016, 0.016])
    control = module.policy_updater.coefficients.entropy
    assert control.last_entropy == pytest.approx(outputs[-1]["metrics"]["policy/entropy"])


def test_a_completion_far_off_the_policy_is_masked_where_its_advantage_is_negative():
    objective = Objective(off_policy_threshold=1e-4)
    module = make_module(update={"epochs": 4}, objective=objective)
    outputs = fit(module, max_steps=8)
    assert 0 < outputs[-1]["metrics"]["policy/masked_fraction"] < 1


def test_minibatches_beyond_the_groups_of_a_step_are_named_once(caplog):
    module = make_module(update={"minibatches": 1000})
    outputs = fit(module, max_steps=6)
    (line,) = [one for one in caplog.messages if "minibatches" in one]
    num_groups = int(line.split("a rollout step has ")[1].split()[0])
    assert 1 < num_groups < 6
    assert len(outputs) == -(-6 // num_groups)
    assert "not 1000. Set model.update.minibatches" in line


class NoFiniteGradient(L.Callback):
    """Make the gradients of some backward passes NaN."""

    def __init__(self, *numbers):
        self.numbers = numbers
        self.num_passes = 0

    def on_train_start(self, trainer, module):
        parameter = next(iter(module.policy.trainable_parameters()))
        self.handle = parameter.register_hook(self.spoil)

    def on_train_end(self, trainer, module):
        self.handle.remove()

    def spoil(self, gradient):
        self.num_passes += 1
        return gradient * float("nan") if self.num_passes in self.numbers else gradient


def test_a_step_without_a_finite_gradient_is_skipped_and_training_goes_on(caplog):
    module = make_module()
    outputs = fit(module, callbacks=[NoFiniteGradient(2)], max_steps=3)
    metrics = [one["metrics"] for one in outputs]
    assert [one["policy/skipped_fraction"] for one in metrics] == [0, 1, 0, 0]
    assert ["policy/grad_norm" in one for one in metrics] == [True, False, True, True]
    assert module.global_step == 3
    assert all(weight.isfinite().all() for weight in weights(module).values())
    (line,) = [one for one in caplog.messages if "not finite" in one]
    assert line.startswith("the gradient of rollout step 2 is not finite (norm nan)")
    assert "1 in a row, of at most 5 (model.update.max_skipped_steps)" in line


@pytest.mark.parametrize(
    ("update", "places"),
    [
        ({}, ["rollout step 2", "rollout step 3", "rollout step 4"]),
        (
            {"minibatches": 2},
            [
                "optimizer step 2 of rollout step 1",
                "optimizer step 1 of rollout step 2",
                "optimizer step 2 of rollout step 2",
            ],
        ),
    ],
)
def test_skipped_steps_in_a_row_are_told_apart(update, places, caplog):
    fit(make_module(update=update), callbacks=[NoFiniteGradient(2, 3, 4)], max_steps=4)
    lines = [one for one in caplog.messages if "not finite" in one]
    assert [re.search("the gradient of (.*) is not", one)[1] for one in lines] == places


def test_a_skipped_step_changes_neither_weights_nor_optimizer():
    module, skipping = make_module(), make_module(update={"max_skipped_steps": 2})
    fit(module, max_steps=1)
    fit(skipping, callbacks=[NoFiniteGradient(2, 3)], max_steps=9)
    for name, weight in weights(module).items():
        assert weight.equal(weights(skipping)[name]), name


def test_too_many_skipped_steps_in_a_row_stop_the_run_with_the_weights_before_them(tmp_path):
    spoil = NoFiniteGradient(2, 4, 5, 6, 7)
    saving = Checkpoints(dirpath=str(tmp_path), every_n_steps=1, keep_last=9)
    module = make_module(update={"max_skipped_steps": 3})
    outputs = fit(module, callbacks=[spoil, saving], max_steps=9)
    reason = get_stop_reason(module.trainer)
    assert reason.exit_code == ExitCode.DIVERGED == 6
    assert "the gradients of 3 optimizer steps in a row were not finite" in reason.message
    assert len(outputs) == 6  # the 2nd was followed by a good one
    assert module.global_step == 2
    manifests = {path.name: read_manifest(path) for path in tmp_path.glob("step_*.ckpt")}
    assert all(one.is_finite for one in manifests.values())
    assert {name: one.trouble for name, one in sorted(manifests.items())} == {
        "step_000001.ckpt": "",
        "step_000002.ckpt": "1 optimizer steps in a row were skipped",
        "step_000003.ckpt": "",
        "step_000004.ckpt": "1 optimizer steps in a row were skipped",
        "step_000005.ckpt": "2 optimizer steps in a row were skipped",
        "step_000006.ckpt": "3 optimizer steps in a row were skipped",
    }
    again = make_module(update={"max_skipped_steps": 3})
    fit(again, max_steps=4, ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == 4
    assert get_stop_reason(again.trainer) is None


def test_a_resumed_run_remembers_the_steps_that_were_skipped(tmp_path):
    saving = Checkpoints(dirpath=str(tmp_path), every_n_steps=2, keep_last=9)
    module = make_module(update={"max_skipped_steps": 9})
    fit(module, callbacks=[NoFiniteGradient(2, 3, 4), saving], max_steps=2)
    again = make_module(update={"max_skipped_steps": 3})
    # Its own first two make three with the one before the checkpoint.
    path = tmp_path / "step_000002.ckpt"
    fit(again, callbacks=[NoFiniteGradient(1, 2)], max_steps=9, ckpt_path=path)
    assert get_stop_reason(again.trainer).exit_code == ExitCode.DIVERGED
    assert again.global_step == 1
