"""An object in another form than class_path and init_args is shown in the right one."""

from __future__ import annotations

import pytest
from config_errors import error_of

from lit_grpo.cli.parsing.object_checks import refuse_other_forms
from lit_grpo.types import UserError

BESIDE = {
    "model: {rewards: [{class_path: MathReward, weight: 0.5}]}": (
        "my.yaml: model.rewards.0: weight must be under init_args, got it beside class_path. "
        "Write {class_path: MathReward, init_args: {weight: 0.5}}."
    ),
    "model: {rewards: [{class_path: MathReward, init_args: {correct: 2}, weight: 0.5}]}": (
        "Write {class_path: MathReward, init_args: {correct: 2, weight: 0.5}}."
    ),
    "model: {engine: {class_path: HFEngine, max_concurrent: 5}}": (
        "my.yaml: model.engine: max_concurrent must be under init_args"
    ),
    "model: {optimizer: {class_path: AdamW, lr: 1.0e-3}}": (
        "Write {class_path: AdamW, init_args: {lr: 0.001}}."
    ),
    "data: {class_path: PromptData, train: a.jsonl, chat: true}": (
        "my.yaml: data: train and chat must be under init_args"
    ),
    "trainer: {callbacks: [{class_path: Checkpoints, every_n_steps: 5}]}": (
        "my.yaml: trainer.callbacks.0: every_n_steps must be under init_args"
    ),
    "model: {optimizer: null, class_path: AdamW, init_args: {lr: 1.0e-5}}": (
        "my.yaml: model.optimizer is empty, and class_path and init_args stand beside it, not "
        "below it. Indent them by two more spaces."
    ),
    "model: {rewards: [{class_path: ProcessReward, init_args: "
    "{reward: {class_path: mine.Slow, weight: 2}}}]}": (
        "my.yaml: model.rewards.0.init_args.reward: weight must be under init_args"
    ),
}


@pytest.mark.parametrize("config", BESIDE)
def test_arguments_beside_a_class_path_are_named_and_shown_in_their_place(config, capsys):
    assert BESIDE[config] in error_of(capsys, config=config)


def test_arguments_beside_a_class_path_are_named_on_the_command_line_too(capsys):
    line = error_of(capsys, "--model.rewards", "[{class_path: MathReward, weight: 0.5}]")
    assert line.startswith("the command line: model.rewards.0: weight must be under init_args")


FORMS = {
    "model: {rewards: [MathReward: {weight: 2}]}": (
        "model.rewards.0 must be a class, got a mapping with the key MathReward. "
        "Write {class_path: MathReward, init_args: {weight: 2}}."
    ),
    "model: {rewards+: [MathReward, {FormatReward: {pattern: a}}]}": (
        "model.rewards.1 must be a class, got a mapping with the key FormatReward. "
        "Write {class_path: FormatReward, init_args: {pattern: a}}."
    ),
    "model: {rewards: {MathReward: {weight: 2}, mine.Short: null}}": (
        "model.rewards must be a list of classes, got a mapping with the key MathReward. "
        "Write rewards: [{class_path: MathReward, init_args: {weight: 2}}, mine.Short]."
    ),
    "model: {rewards: {class_path: MathReward}}": "Write rewards: [{class_path: MathReward}].",
    "model: {rewards: [{name: MathReward, weight: 2}]}": (
        "got a mapping with the key name. Write {class_path: MathReward, init_args: {weight: 2}}."
    ),
    "model: {rewards: [{_target_: mine.Short, kwargs: {limit: 2}}]}": (
        "Write {class_path: mine.Short, init_args: {limit: 2}}."
    ),
    "model: {class_path: mine.My, init_args: {rewards: [MathReward: {weight: 2}]}}": (
        "model.rewards.0 must be a class"
    ),
    "model: {engine: {HFEngine: {max_concurrent: 5}}}": (
        "model.engine must be a class, got a mapping with the key HFEngine. "
        "Write {class_path: HFEngine, init_args: {max_concurrent: 5}}."
    ),
    "data: {PromptData: {train: a.jsonl}}": (
        "Write {class_path: PromptData, init_args: {train: a.jsonl}}."
    ),
    "trainer: {callbacks: [Checkpoint]}": (
        "trainer.callbacks.0: Checkpoint is only the base class of others, and saves nothing. Did "
        "you mean Checkpoints?"
    ),
    "trainer: {callbacks: [{class_path: Checkpoint, init_args: {every_n_steps: 5}}]}": (
        "Did you mean Checkpoints?"
    ),
    "model: {rewards: [{class_path: MathReward, kwargs: {weight: 2}}]}": (
        "model.rewards.0.kwargs: no such key. Did you mean init_args?"
    ),
    "model: {rewards: [{class_path: MathReward, args: {weight: 2}}]}": (
        "model.rewards.0.args: no such key. Did you mean init_args?"
    ),
}


@pytest.mark.parametrize("config", FORMS)
def test_an_object_in_another_form_is_shown_in_the_right_one(config, capsys):
    line = error_of(capsys, config=config)
    assert line.startswith("my.yaml: ")
    assert FORMS[config] in line


@pytest.mark.parametrize("key", ["--model.rewards", "--model.rewards+"])
def test_an_object_in_another_form_is_shown_the_right_one_on_the_command_line_too(key, capsys):
    line = error_of(capsys, key, "[MathReward: {weight: 2}]")
    assert line.startswith("the command line: model.rewards.0 must be a class, got a mapping with")


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"rewards": ["MathReward", {"class_path": "mine.Short", "init_args": {}}]}},
        {"model": {"rewards+": {"class_path": "MathReward"}}},
        {"model.rewards+": {"class_path": "MathReward"}},
        {"model.rewards.name": "Short"},
        {"model": {"optimizer": {"lr": 1e-3}, "policy": {"path": "Checkpoint"}}},
        {"model": "mine.My", "data": {"init_args": {"columns": {"prompt": "Question"}}}},
        {"trainer": {"callbacks": {"class_path": "mine.Checkpoint"}}},
        {"trainer": {"callbacks": ["lightning.pytorch.callbacks.ModelCheckpoint"]}},
    ],
)
def test_what_is_right_passes(config):
    refuse_other_forms(config, "my.yaml")


@pytest.mark.parametrize("path", ["Checkpoint", "lightning.pytorch.callbacks.Checkpoint"])
def test_the_base_class_of_checkpoints_is_refused_by_either_path(path):
    with pytest.raises(UserError, match="Did you mean Checkpoints"):
        refuse_other_forms({"trainer.callbacks+": path}, "the command line")
