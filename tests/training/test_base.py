import math
import re
import sys

import pytest
import torch
from small_runs import fit, make_module, make_trainer
from tiny import tiny_policy

from lit_grpo.rewards import MathReward
from lit_grpo.rollout import Launch, SGLangEngine, VLLMEngine
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
    module = make_module(evaluation=Evaluation(accuracy=MathReward(only_sources=["sumz"])))
    with pytest.raises(UserError, match="only_sources must be sources .*got 'sumz'"):
        fit(module)


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


def test_servers_without_their_package_are_refused_before_the_model_is_loaded():
    module = make_module(engine=SGLangEngine(launch=Launch(python=sys.executable)))
    module.trainer = make_trainer()
    with pytest.raises(UserError, match=r"has no package sglang.* Install it there, or set model"):
        module.setup("fit")


def test_a_policy_may_be_given_by_its_path(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    module = GRPOModule(policy=str(tmp_path), rewards=[MathReward()])
    assert module.policy.path == module.collector._policy.path == str(tmp_path)
    assert GRPOModule(policy=tmp_path, rewards=[MathReward()]).policy.path == str(tmp_path)


def test_a_model_in_place_of_a_policy_is_told_how_to_give_it():
    with pytest.raises(UserError, match="path must be a directory .* got a Llama.* Write the mod"):
        GRPOModule(policy=tiny_policy().model, rewards=[MathReward()])


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


@pytest.mark.parametrize(
    ("returns", "got"),
    [
        (lambda params: None, r"got one that returns None \(its return is missing\?\)\."),
        (
            lambda params: [torch.optim.SGD(params)],
            r"got one that returns .*\. Set model\.optimizer",
        ),
    ],
)
def test_an_optimizer_function_that_returns_something_else_is_refused(returns, got):
    with pytest.raises(
        UserError, match=r"^optimizer must be a function that returns an optim.*" + got
    ):
        fit(make_module(optimizer=returns))


def test_settings_that_an_optimizer_refuses_are_the_users():
    module = make_module(optimizer=lambda params: torch.optim.SGD(params, lr=-1.0))
    with pytest.raises(UserError, match=r"\(Invalid learning rate: -1.0\). Set model.optimizer"):
        fit(module)
    module = make_module(optimizer=lambda params: torch.optim.AdamW(params, lr="1e-5"))
    with pytest.raises(
        UserError, match=r"are all of its settings numbers\?\). Set model.optimizer"
    ):
        fit(module)


def test_a_setting_cannot_be_changed_once_the_module_is_made():
    module = make_module()
    for name, value in (("group_size", 8), ("rewards", []), ("policy", None), ("seed", 1)):
        said = rf"^{name} of a GRPOModule cannot be changed once it is made .* to the constructor"
        with pytest.raises(UserError, match=said):
            setattr(module, name, value)
    module.allow_changes = True  # which is no setting
    module.group_size = int("4")  # as a subclass may do
    assert module.group_size == 4
