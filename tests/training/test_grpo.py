import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from small_runs import (
    PROMPTS,
    ShareOfLowBytes,
    assert_same_runs,
    fit,
    make_module,
    make_trainer,
    start_policy,
    start_weights,
    weights,
)
from tiny import LLAMA, alone

from lit_grpo.data import PromptLoader
from lit_grpo.objective import AdvantageConfig, EntropyTerm, KLTerm, Objective
from lit_grpo.policy import LoRA, Policy
from lit_grpo.rewards import Reward
from lit_grpo.rollout import Sampling
from lit_grpo.training import Evaluation, OutagePolicy
from lit_grpo.training.base import refuse_untested


class Outage(Reward):
    def score(self, prompt, completion):
        raise ConnectionError("the judge is down")


def test_the_update_is_the_policy_gradient_of_the_scored_rollouts():
    """An independent REINFORCE: at one update a rollout the clipped objective has its gradient."""
    module = make_module()
    (output,) = fit(module)
    batch = output["batch"]
    reference, before = start_policy(), start_weights()
    num_tokens = batch.completion_mask.sum()
    loss = -sum(
        batch.advantages[n] * alone(reference.model, batch, n)[0].sum()
        for n in range(batch.num_rows)
    )
    (loss / num_tokens).backward()
    assert batch.advantages.abs().max() > 0.5
    for name, parameter in reference.model.named_parameters():
        step = before[name] - weights(module)[name]
        torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
def test_the_gradient_is_the_same_for_any_split_into_micro_batches(aggregation):
    objective = Objective(
        aggregation=aggregation, kl=KLTerm(coef=0.1), entropy=EntropyTerm(coef=0.01)
    )
    results = []
    for max_tokens in (1, 60, 100_000):
        module = make_module(
            objective=objective,
            update={"max_tokens_per_micro_batch": max_tokens},
            lr_schedule="constant",
        )
        outputs = fit(module)
        results.append((weights(module), outputs[0]["metrics"]))
    assert_same_runs(results, rtol=1e-4, atol=1e-6, metrics_atol=1e-5)


def test_rows_without_advantage_are_spared_the_model_and_the_gradient_is_the_same():
    class FirstGroupOnly(Reward):
        def score(self, prompt, completion):
            return float(completion.token_ids[0] < 128) if prompt.id == "1+1=" else 1.0

    results = {}
    for entropy_coef in (0.0, 1e-30):  # so small that only the rows that run differ
        seen = []
        module = make_module(
            rewards=[FirstGroupOnly()], objective=Objective(entropy=EntropyTerm(coef=entropy_coef))
        )
        outputs = fit(module, callbacks=[RowCount(seen)])
        results[entropy_coef] = weights(module)
        assert sum(seen) == (4 if entropy_coef == 0 else 16)
        assert outputs[0]["metrics"]["policy/grad_norm"] > 0
    for name, spared in results[0.0].items():
        torch.testing.assert_close(spared, results[1e-30][name], rtol=1e-4, atol=1e-6)


def test_a_step_whose_advantages_are_all_zero_has_no_gradient_and_no_made_up_metrics():
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


def test_what_would_train_wrongly_is_refused_before_training():
    with pytest.raises(ValueError, match="Set trainer.precision"):
        refuse_untested(SimpleNamespace(strategy=SingleDeviceStrategy(), precision="16-mixed"))
    with pytest.raises(ValueError, match="Set trainer.strategy"):
        refuse_untested(SimpleNamespace(strategy=FSDPStrategy(), precision="32-true"))


def test_a_gradient_that_is_not_finite_never_reaches_the_policy():
    module = make_module()

    class Poison(L.Callback):
        def on_stage_end(self, trainer, pl_module, stage):
            if stage.name == "micro_batch":
                next(pl_module.parameters()).grad.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="no optimizer step is taken"):
        fit(module, callbacks=[Poison()])
    torch.testing.assert_close(weights(module), start_weights(), rtol=0, atol=0)


def test_an_evaluation_that_could_judge_nothing_has_no_older_accuracy():
    class DownLater(Reward):
        calls = 0

        def score(self, prompt, completion):
            self.calls += 1
            return 1.0 if self.calls <= len(PROMPTS) else None

    module = make_module()
    module.evaluation = Evaluation(accuracy=DownLater(weight=0.5), before_training=False)
    seen = []

    class Seen(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["val/accuracy"]))

    trainer = make_trainer(Seen(), max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, PromptLoader(PROMPTS, 4), PromptLoader(PROMPTS, 4, training=False))
    assert seen[0] == 1.0  # whatever the weight
    assert math.isnan(seen[1])


class RowCount(L.Callback):
    def __init__(self, seen):
        self.seen = seen

    def on_stage_end(self, trainer, pl_module, stage):
        if stage.name == "micro_batch":
            self.seen.append(stage.details["rows"])


def test_a_name_without_a_value_in_a_step_is_logged_as_such(tmp_path):
    class DownLater(Reward):
        calls = 0

        def score_group(self, prompt, completions):
            DownLater.calls += 1
            if DownLater.calls > len(PROMPTS):
                raise ConnectionError("down")
            return [float(len(c.token_ids)) for c in completions]

    logged = []

    class Logged(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            logged.append(dict(trainer.logged_metrics))

    module = make_module(rewards=[DownLater()], outage=OutagePolicy(max_absent_fraction=1))
    fit(module, callbacks=[Logged()], max_steps=-1, max_epochs=2)
    assert logged[0]["reward/mean"] > 0
    assert logged[1]["reward/mean"].isnan()
    assert logged[1]["policy/loss"].isnan()
    assert logged[1]["reward/valid_fraction"] == 0


def test_the_sampling_temperature_applies_to_the_trained_logprobs():
    module = make_module(sampling=Sampling(max_tokens=8, temperature=0.5))
    (output,) = fit(module)
    assert output["metrics"]["sampler/logprob_difference_max"] < 1e-4


def test_several_updates_a_rollout_are_several_optimizer_steps_off_the_old_policy():
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


def test_one_update_a_rollout_needs_no_second_pass_and_has_ratio_one():
    (output,) = fit(make_module())
    assert output["batch"].old_logprobs is None
    assert output["metrics"]["policy/ratio_mean"] == 1.0
    assert "policy/kl" not in output["metrics"]


def test_the_kl_term_is_that_to_the_policy_that_training_started_from():
    module = make_module(objective=Objective(kl=KLTerm(coef=0.5)), policy={"lora": LoRA(rank=4)})
    first, second = fit(module, max_steps=2)
    assert first["metrics"]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert second["metrics"]["policy/kl"] > 1e-7
    batch, rows = second["batch"], range(second["batch"].num_rows)
    with torch.no_grad(), module.policy.model.disable_adapter():
        expected = [alone(module.policy.model, batch, n)[0] for n in rows]
    for n in rows:
        got = batch.ref_logprobs[n][batch.completion_mask[n]]
        torch.testing.assert_close(got, expected[n], rtol=0, atol=1e-5)


def test_two_runs_of_one_seed_are_bit_identical_and_another_seed_differs():
    runs = []
    for seed in (0, 0, 1):
        module = make_module(seed=seed)
        fit(module, max_steps=3)
        runs.append(weights(module)["lm_head.weight"])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_no_optimizer_step_is_taken_where_no_row_is_valid(caplog):
    module = make_module(rewards=[Outage()], outage=OutagePolicy(max_absent_fraction=1))
    outputs = fit(module, max_steps=-1, max_epochs=2)
    assert [output["batch"] for output in outputs] == [None, None]
    assert module.global_step == 0
    assert outputs[0]["metrics"]["reward/valid_fraction"] == 0.0
    assert outputs[0]["metrics"]["reward/outage/error_fraction"] == 1.0
    assert "reward/mean" not in outputs[0]["metrics"]
    assert "no token to train on" in caplog.text
    torch.testing.assert_close(weights(module), start_weights(), rtol=0, atol=0)


def test_only_valid_rows_vote_and_are_trained_on():
    class HalfDown(Reward):
        def score(self, prompt, completion):
            return None if completion.token_ids[0] % 2 else float(len(completion.token_ids))

    (output,) = fit(make_module(rewards=[HalfDown()]))
    batch, rollouts = output["batch"], output["rollouts"]
    trained = batch.loss_mask.any(1)
    valid = rollouts.valid.flatten()
    assert 0 < valid.sum() < len(valid)
    assert not (trained & ~valid).any()
    assert not batch.advantages[~valid].any()
    lengths = torch.tensor([len(c.token_ids) for c in rollouts.completions], dtype=torch.float64)
    for group, votes in enumerate(rollouts.valid):
        own = lengths.view(4, 4)[group][votes]
        if len(own) >= 2 and own.std() > 0:
            expected = (own - own.mean()) / (own.std() + 1e-4)
            got = batch.advantages.view(4, 4)[group][votes].double()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_overlong_filtering_trains_on_no_truncated_completion():
    (output,) = fit(make_module(objective=Objective(overlong_filtering=True)))
    truncated = torch.tensor([c.is_truncated for c in output["rollouts"].completions])
    assert truncated.any()
    assert not output["batch"].loss_mask[truncated].any()
    assert output["batch"].loss_mask[~truncated].any()


def test_the_gradient_is_scaled_down_to_its_bound():
    free = make_module()
    (output,) = fit(free)
    norm = output["metrics"]["policy/grad_norm"]
    held = make_module(update={"max_grad_norm": norm / 4})
    fit(held)
    before = start_weights()
    for name, start in before.items():
        torch.testing.assert_close(
            weights(held)[name] - start, (weights(free)[name] - start) / 4, rtol=1e-2, atol=1e-6
        )


def test_the_learning_rate_warms_up_and_follows_its_schedule():
    outputs = fit(make_module(lr_schedule="cosine", warmup_steps=2), max_steps=6)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    cosine = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates == pytest.approx([0.0, 0.5, *cosine])


def test_the_schedule_counts_the_steps_of_epochs_and_updates():
    module = make_module(lr_schedule="linear", update={"epochs": 2})
    outputs = fit(module, max_steps=-1, max_epochs=3)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    # Six optimizer steps; the metric is the mean over the two of a rollout step.
    assert rates == pytest.approx([(6 + 5) / 12, (4 + 3) / 12, (2 + 1) / 12])


def test_batch_deviation_and_normalise_then_sum_reach_the_advantages():
    class Length(Reward):
        def score(self, prompt, completion):
            return float(len(completion.token_ids))

    config = AdvantageConfig(deviation="batch", combine="normalise_then_sum")
    (output,) = fit(make_module(rewards=[ShareOfLowBytes(), Length(weight=0.5)], advantage=config))
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for name, weight in (("share_of_low_bytes", 1.0), ("length", 0.5)):
        part = output["rollouts"].parts[name]
        expected += weight * (part - part.mean(1, keepdim=True)) / (part.std() + 1e-4)
    torch.testing.assert_close(output["batch"].advantages, expected.flatten().float())


def test_stages_are_told_to_callbacks_as_they_end():
    class Listener(L.Callback):
        def __init__(self):
            self.started, self.ended = [], []

        def on_stage_start(self, trainer, pl_module, name):
            self.started.append(name)

        def on_stage_end(self, trainer, pl_module, stage):
            self.ended.append(stage)

    listener = Listener()
    fit(make_module(update={"max_tokens_per_micro_batch": 60}), callbacks=[listener])
    assert list(dict.fromkeys(listener.started)) == [
        "weight_sync",
        "generation",
        "reward",
        "logprob",
        "update",
        "micro_batch",
    ]
    parts = [stage for stage in listener.ended if stage.name == "micro_batch"]
    assert [stage.micro_batch for stage in parts] == list(range(len(parts)))
    assert len(parts) > 1
    assert sum(stage.details["rows"] for stage in parts) == 16
    assert listener.ended[-1].name == "update"
    assert listener.ended[-1].seconds >= sum(stage.seconds for stage in parts)


def test_a_checkpoint_of_an_adapter_leaves_its_base_out_and_restores(tmp_path):
    base = tmp_path / "base"
    start = Policy(architecture=LLAMA)
    start.load(with_reference=False)
    start.save_pretrained(base)
    policy = {"architecture": None, "path": str(base), "lora": LoRA(rank=4)}
    module = make_module(policy=policy)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved
    assert all("lora" in name for name in saved)
    again = make_module(policy=policy)
    second = make_trainer(max_steps=2)
    second.fit(again, PromptLoader(PROMPTS, 4), ckpt_path=path, weights_only=True)
    torch.testing.assert_close(weights(again), weights(module), rtol=0, atol=0)
    other = make_module(policy=policy | {"lora": LoRA(rank=4, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match="it is of another policy"):
        second.fit(other, PromptLoader(PROMPTS, 4), ckpt_path=path, weights_only=True)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"group_size": 1}, "Set model.group_size"),
        ({"sampling": Sampling(temperature=0.0)}, "Set model.sampling.temperature"),
        ({"update": {"epochs": 0}}, "Set model.update.epochs"),
    ],
)
def test_impossible_settings_are_refused_when_the_config_is_read(settings, fix):
    with pytest.raises(ValueError, match=fix):
        make_module(**settings)


def test_a_run_without_an_end_has_no_schedule():
    with pytest.raises(ValueError, match="Set trainer.max_steps"):
        fit(make_module(lr_schedule="cosine"), max_steps=-1, max_epochs=-1)


@pytest.mark.slow
def test_a_compiled_forward_takes_the_same_steps_and_is_not_compiled_at_each():
    small = {"architecture": LLAMA | {"num_hidden_layers": 1}}
    plain, compiled = make_module(policy=small), make_module(policy=small | {"compile": True})
    expected, outputs = (fit(module, max_steps=6) for module in (plain, compiled))
    for name, value in expected[0]["metrics"].items():
        assert outputs[0]["metrics"][name] == pytest.approx(value, abs=1e-4), name
    lengths = {output["batch"].completion_mask.sum().item() for output in outputs}
    assert len(lengths) > 3  # unlike shapes
    counts = [output["metrics"]["perf/num_compilations"] for output in outputs]
    assert counts[2] == counts[-1]
    assert "perf/num_compilations" not in expected[0]["metrics"]
