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
    assert said.endswith(f", got the text {word}. Write null.")


def test_none_in_a_file_is_told_how_null_is_written(here, capsys):
    data = "data: {class_path: PromptData, init_args: {train: a.jsonl, max_prompt_tokens: None}}"
    (here / "my.yaml").write_text(data)
    assert error_of(["--config=my.yaml"], here, capsys) == (
        "data: PromptData.max_prompt_tokens: expected int or null, got the text None. Write null."
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
