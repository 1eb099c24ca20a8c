"""A warm-up on prompts of another format than those that it is a warm-up for."""

from types import SimpleNamespace

import pytest

from lit_grpo import AdditionData, PromptData
from lit_grpo.data import RubricData
from lit_grpo.runs.files.prompt_format import (
    format_of,
    warn_of_other_format,
    write_prompt_format,
)
from lit_grpo.types import Prompt


def warning_of(tmp_path, caplog, before, now, *, path="final"):
    (tmp_path / "final").mkdir()
    write_prompt_format(tmp_path / "final", format_of(SimpleNamespace(datamodule=before)))
    warn_of_other_format(SimpleNamespace(datamodule=now), path and str(tmp_path / path))
    return caplog.text


def test_other_settings_of_the_format_are_named(tmp_path, caplog):
    text = warning_of(tmp_path, caplog, PromptData(), PromptData(chat=True, system_prompt="Add."))
    assert f"{tmp_path / 'final'} was trained on prompts of another format" in text
    assert "(data.system_prompt: None -> 'Add.'; data.chat: False -> True)" in text
    assert f"set them as in {tmp_path / 'final/prompt_format.json'}." in text


@pytest.mark.parametrize(
    ("before", "now", "path"),
    [
        (PromptData(chat=True), PromptData(chat=True), "final"),
        (PromptData(system_prompt=""), PromptData(), "final"),
        (AdditionData(2), PromptData(), "final"),
        (RubricData(), PromptData(chat=True), "final"),
        (PromptData(), PromptData(chat=True), "gone"),
        (PromptData(), PromptData(chat=True), None),
    ],
    ids=["same", "empty", "built-in task", "other data", "no directory", "random weights"],
)
def test_the_same_format_or_one_that_cannot_be_compared_is_not_warned_of(
    before, now, path, tmp_path, caplog
):
    assert warning_of(tmp_path, caplog, before, now, path=path) == ""


def test_a_file_that_is_none_of_ours_is_not_read(tmp_path, caplog):
    (tmp_path / "prompt_format.json").write_text("[1]")
    warn_of_other_format(SimpleNamespace(datamodule=PromptData(chat=True)), str(tmp_path))
    assert caplog.text == ""


def trainer_of(data, *, has_messages):
    messages = ({"role": "user", "content": "1+1="},) if has_messages else None
    prompts = [Prompt(id="1", text="1+1=", token_ids=(1,), messages=messages)]
    loader = SimpleNamespace(some_prompts=lambda: prompts)
    return SimpleNamespace(datamodule=data, train_dataloader=loader)


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        ((PromptData(), False), (PromptData(), True), "plain text -> conversations; data.chat"),
        ((PromptData(chat=True), True), (PromptData(), False), "conversations -> plain text; "),
        ((PromptData(), True), (PromptData(chat=True), True), ""),
        ((PromptData(), False), (PromptData(), False), ""),
    ],
)
def test_lists_of_messages_are_conversations_without_a_setting(
    before, now, change, tmp_path, caplog
):
    write_prompt_format(tmp_path, format_of(trainer_of(before[0], has_messages=before[1])))
    warn_of_other_format(trainer_of(now[0], has_messages=now[1]), str(tmp_path))
    assert (f"({change}" in caplog.text) if change else (caplog.text == "")
