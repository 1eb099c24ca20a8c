import math
import re

import lightning as L
import pytest
import torch
from small_runs import PROMPTS, fit, fit_and_evaluate, make_module, make_trainer, weights
from tiny import tiny_policy

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data import PromptLoader
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA
from lit_grpo.rewards import MathReward, Reward
from lit_grpo.rollout import SGLangEngine, VLLMEngine
from lit_grpo.training import Evaluation, GRPOModule
from lit_grpo.types import UserError


def test_the_learning_rate_warms_up_and_follows_its_schedule():
    outputs = fit(make_module(lr_schedule="cosine", warmup_steps=2), max_steps=6)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    cosine = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates == pytest.approx([0.0, 0.5, *cosine])


def test_the_schedule_counts_the_steps_of_epochs_and_updates():
    module = make_module(lr_schedule="linear", update={"epochs": 2})
    outputs = fit(module, max_steps=-1, max_epochs=3)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    # There are six optimizer steps; the metric is the mean over the two of a rollout step.
    assert rates == pytest.approx([(6 + 5) / 12, (4 + 3) / 12, (2 + 1) / 12])


def test_a_schedule_without_an_end_of_the_run_is_refused():
    with pytest.raises(ValueError, match="Set trainer.max_steps"):
        fit(make_module(lr_schedule="cosine"), max_steps=-1, max_epochs=-1)


def test_a_schedule_of_a_run_without_steps_has_no_length():
    fit(make_module(lr_schedule="linear"), max_steps=0)


def test_an_accuracy_for_a_source_that_the_data_does_not_have_is_refused():
    module = make_module()
    module.evaluation = Evaluation(accuracy=MathReward(only_sources=["sumz"]))
    with pytest.raises(UserError, match="only_sources must be sources .*got 'sumz'"):
        fit(module)


def test_a_run_without_a_last_step_says_at_its_start_how_it_ends(caplog):
    class StopAtOnce(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = True

    caplog.set_level("INFO")
    fit(make_module(), callbacks=[StopAtOnce()], max_steps=-1, max_epochs=-1)
    (said,) = (one for one in caplog.messages if "no last step" in one)
    assert "Ctrl-C ends it" in said


def test_an_evaluation_without_scores_logs_nan_instead_of_the_last_accuracy():
    class DownLater(Reward):
        num_calls = 0

        def score(self, prompt, completion):
            self.num_calls += 1
            return 1.0 if self.num_calls <= len(PROMPTS) else None

    class RecordAccuracy(L.Callback):
        def __init__(self):
            self.values = []

        def on_validation_end(self, trainer, pl_module):
            self.values.append(float(trainer.callback_metrics["val/accuracy"]))

    module = make_module()
    module.evaluation = Evaluation(accuracy=DownLater(weight=0.5), before_training=False)
    accuracy = RecordAccuracy()
    fit_and_evaluate(module, accuracy)
    assert accuracy.values[0] == 1.0  # the weight makes no difference
    assert math.isnan(accuracy.values[1])


def test_a_checkpoint_of_an_adapter_omits_its_base_and_can_be_resumed(tmp_path):
    base = tmp_path / "base"
    tiny_policy().save_pretrained(base)
    policy = {"architecture": None, "path": str(base), "lora": LoRA(rank=4)}
    module = make_module(policy=policy)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved
    assert all("lora" in name for name in saved)
    resumed = make_module(policy=policy)
    fit(resumed, max_steps=2, ckpt_path=path)
    torch.testing.assert_close(weights(resumed), weights(module), rtol=0, atol=0)
    other = make_module(policy=policy | {"lora": LoRA(rank=4, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match="it belongs to a different policy"):
        fit(other, max_steps=2, ckpt_path=path)


def test_a_checkpoint_omits_a_reference_that_never_moves_and_the_resumed_run_has_it(tmp_path):
    start = tmp_path / "start"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)}
    objective = Objective(kl=KLTerm(coef=0.5))
    whole = make_module(policy=policy, objective=objective)
    fit(whole, max_steps=4)
    module = make_module(policy=policy, objective=objective)
    saving = Checkpoints(dirpath=str(tmp_path))
    fit(module, callbacks=[saving], max_steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {f"policy.model.{name}" for name in module.policy.model.state_dict()}
    resumed = make_module(policy=policy, objective=objective)
    fit(resumed, max_steps=4, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    ours, theirs = (one.policy.reference_model.state_dict() for one in (resumed, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_reference_whose_files_were_replaced_ends_the_resume_and_only_that(tmp_path):
    start, last = tmp_path / "start", tmp_path / "last.ckpt"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)}
    with_reference = {"policy": policy, "objective": Objective(kl=KLTerm(coef=0.5))}
    fit(make_module(**with_reference), callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=2)
    tiny_policy(seed=1).save_pretrained(start)
    with pytest.raises(UserError, match="have been replaced since"):
        fit(make_module(**with_reference), max_steps=3, ckpt_path=last)
    make_trainer().validate(make_module(**with_reference), PromptLoader(PROMPTS, 4), last)

    own_weights = make_module(policy=policy)  # all of them are in the checkpoint
    tiny_policy().save_pretrained(start)
    fit(own_weights, callbacks=[Checkpoints(dirpath=str(tmp_path / "own"))], max_steps=2)
    tiny_policy(seed=1).save_pretrained(start)
    fit(make_module(policy=policy), max_steps=3, ckpt_path=tmp_path / "own" / "last.ckpt")


@pytest.mark.parametrize("refresh_every", [None, 1], ids=["random weights", "moving"])
def test_a_reference_that_cannot_be_read_again_is_in_the_checkpoint(tmp_path, refresh_every):
    start = tmp_path / "start"
    tiny_policy().save_pretrained(start)
    policy = {"architecture": None, "path": str(start)} if refresh_every else {}
    objective = Objective(kl=KLTerm(coef=0.5, refresh_every=refresh_every))
    module = make_module(policy=policy, objective=objective)
    fit(module, callbacks=[Checkpoints(dirpath=str(tmp_path))], max_steps=2)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert any("reference_model" in name for name in saved)
    assert saved.keys() == module.state_dict().keys()


def test_servers_that_other_machines_do_not_reach_are_refused_before_the_model_is_loaded():
    module = make_module(engine=SGLangEngine(urls=["http://127.0.0.1:30000"]))
    module.trainer = make_trainer(num_nodes=2, devices=1)
    with pytest.raises(UserError, match=r"urls must be .* with trainer.num_nodes: 2"):
        module.setup("fit")


def test_processes_that_an_engine_cannot_have_are_refused_before_the_model_is_loaded():
    module = make_module(engine=VLLMEngine())
    module.trainer = make_trainer(devices=2)
    with pytest.raises(UserError, match="VLLMEngine needs a run with a single process"):
        module.setup("fit")


def test_a_policy_may_be_given_by_its_path(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    module = GRPOModule(policy=str(tmp_path), rewards=[MathReward()])
    assert module.policy.path == module.collector._policy.path == str(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("policy", 3, "Policy"),
        ("rewards", MathReward(), "list or tuple"),
        ("sampling", {"max_tokens": 8}, "Sampling"),
        ("objective", "dapo", "Objective"),
        ("update", 2, "UpdateConfig"),
        ("outage", "wait", "OutagePolicy"),
        ("engine", "vllm", "RolloutEngine"),
        ("evaluation", 3, "Evaluation"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(key, value, rule):
    settings = {"policy": tiny_policy(), "rewards": [MathReward()]} | {key: value}
    with pytest.raises(UserError, match=f"{key} must be of type {rule}, got .* Set model.{key}"):
        GRPOModule(**settings)


@pytest.mark.parametrize("key", ["seed", "warmup_steps"])
def test_a_negative_number_is_refused_before_the_model_is_loaded(key):
    with pytest.raises(UserError, match=f"{key} must be >= 0, got -1. Set model.{key}"):
        make_module(**{key: -1})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("group_size", "4", "an integer"),
        ("warmup_steps", (1,), "an integer"),
        ("seed", 1.5, "of type"),
    ],
)
def test_a_number_of_another_type_is_named(key, value, rule):
    with pytest.raises(UserError, match=f"{key} must be {rule}.*, got {re.escape(repr(value))}"):
        make_module(**{key: value})


def test_settings_that_an_optimizer_refuses_are_the_users():
    module = make_module(optimizer=lambda params: torch.optim.SGD(params, lr=-1.0))
    with pytest.raises(UserError, match=r"\(Invalid learning rate: -1.0\). Set model.optimizer"):
        fit(module)
