"""What a user sees after a value of the wrong type."""

import pytest
import yaml
from tiny import LLAMA

from lit_grpo.__main__ import main

BASE = {
    "model": {"policy": {"architecture": LLAMA}, "rewards": ["MathReward"]},
    "data": {"class_path": "AdditionData", "init_args": {"num_digits": 2}},
}


def error_of(arguments, here, capsys) -> str:
    """Return the line that ``fit`` prints with a correct config and further arguments."""
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    assert main(["fit", "--config=base.yaml", *arguments]) == 2
    return capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--model.objective.kl.target=None", "model.objective.kl.target: expected float or null"),
        ("--model.objective.ratio_cap=none", "model.objective.ratio_cap: expected float or null"),
        ("--model.engine=None", "model.engine: expected RolloutEngine or null"),
        ("--model.policy.lora=None", "model.policy: Policy.lora: expected LoRA or null"),
        ("--trainer.callbacks=None", "trainer.callbacks: expected list[Callback] or Callback or"),
    ],
)
def test_the_word_for_null_of_another_language_is_told_how_null_is_written(
    argument, line, here, capsys
):
    said = error_of([argument], here, capsys)
    assert said.startswith(line)
    word = argument.partition("=")[2]
    assert said.endswith(f", got the string {word}. Write null.")


@pytest.mark.parametrize(
    ("argument", "key", "rule"),
    [
        ("--run_dir=None", "run_dir", "str, got the string None. Remove it, or ./None for a pa"),
        ("--ckpt_path=None", "ckpt_path", "str or null, got the string None. Write null, or ./No"),
        ("--data.validation=None", "data: PromptData.validation", "str or list[str] or null, got"),
        ("--data.template=None", "data: PromptData.template", "str or null, got the string None."),
        ("--model.policy.path=None", "model.policy: Policy.path", "str or null, got the string "),
        ("--model.teacher.path=None", "model.teacher: LocalTeacher.path", "str, got the string"),
        ("--model.rewards.name=None", "model.rewards: MathReward.name", "str or null, got the s"),
    ],
)
def test_none_is_no_text_where_null_or_a_path_may_stand(argument, key, rule, here, capsys):
    words = ["--data=PromptData", "--data.train=a.jsonl", "--model.teacher=LocalTeacher"]
    said = error_of([*words, argument], here, capsys)
    assert said.startswith(f"{key}: expected {rule}")
    assert "got the string None. " in said
    assert not (here / "None").exists()


@pytest.mark.parametrize(
    "text",
    [
        "run_dir: None",
        "data: {class_path: PromptData, init_args: {train: a.jsonl, validation: None}}",
        "model: {policy: {tokenizer: None}}",
        "model: {rewards: [{class_path: JudgeReward, init_args: {judge: {cache: None}}}]}",
    ],
)
def test_none_as_a_path_in_a_file_is_refused(text, here, capsys):
    (here / "my.yaml").write_text(text)
    assert "got the string None. " in error_of(["--config=my.yaml"], here, capsys)


def test_none_is_a_text_where_only_a_text_may_stand(printed_config, here):
    words = ["--model.rewards=[FormatReward]", "--model.rewards.pattern=None", "--run_dir=./None"]
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    printed = printed_config("--config=base.yaml", *words)
    assert printed["model"]["rewards"][0]["init_args"]["pattern"] == "None"
    assert printed["run_dir"] == "./None"


def test_none_in_a_file_is_told_how_null_is_written(here, capsys):
    data = "data: {class_path: PromptData, init_args: {train: a.jsonl, max_prompt_tokens: None}}"
    (here / "my.yaml").write_text(data)
    assert error_of(["--config=my.yaml"], here, capsys) == (
        "data: PromptData.max_prompt_tokens: expected int or null, got the string None. Write null."
    )


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--model.rewards=null", "model.rewards: required, but not set. Training without rewards"),
        ("--model.group_size=null", "model.group_size: expected int, got null. Remove it for the"),
    ],
)
def test_null_where_a_value_is_needed_is_not_said_to_be_a_text(argument, line, here, capsys):
    assert error_of([argument], here, capsys).startswith(line)


def test_a_mapping_without_spaces_is_told_how_one_is_written(here, capsys):
    data = "data: {class_path: PromptData, init_args: {train: a.jsonl}}"
    (here / "my.yaml").write_text(data)
    words = ["--config=my.yaml", "--data.columns", "{prompt:ask,answer:told}"]
    assert error_of(words, here, capsys) == (
        "data: PromptData.columns: expected dict[str, str] or null, got {prompt:ask,answer:told}. "
        "Write it in quotes, with a space after each colon: '{a: b, c: d}'."
    )
