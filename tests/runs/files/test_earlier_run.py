"""A warm-up on prompts of another format than those that it is a warm-up for."""

from types import SimpleNamespace

import pytest
import yaml

from lit_grpo import AdditionData, PromptData
from lit_grpo.runs.files.earlier_run import warn_of_other_format

OF_WARM_UP = {"template": None, "system_prompt": None, "chat": True, "chat_template_kwargs": None}


def warning_of(tmp_path, caplog, data, *, path="final", kind="lit_grpo.PromptData", **changed):
    config = {"data": {"class_path": kind, "init_args": OF_WARM_UP | changed}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "final").mkdir()
    trainer = SimpleNamespace(datamodule=data)
    warn_of_other_format(trainer, path and str(tmp_path / path))
    return caplog.text


def test_other_settings_of_the_format_are_named(tmp_path, caplog):
    text = warning_of(tmp_path, caplog, PromptData(chat=True, system_prompt="Add."), chat=False)
    assert f"{tmp_path / 'final'} was trained on prompts of another format" in text
    assert "(data.system_prompt: None -> 'Add.'; data.chat: False -> True)" in text
    assert f"set them as in {tmp_path / 'config.yaml'}." in text


def test_a_warm_up_on_the_built_in_task_had_plain_prompts(tmp_path, caplog):
    config = {"data": {"class_path": "lit_grpo.AdditionData", "init_args": {"num_digits": 2}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "final").mkdir()
    for data in (AdditionData(2), PromptData(), PromptData(chat=True)):
        warn_of_other_format(SimpleNamespace(datamodule=data), str(tmp_path / "final"))
    (warned,) = caplog.messages
    assert "(data.chat: False -> True)" in warned


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        (PromptData(chat=True), {}),
        (PromptData(chat=True), {"system_prompt": "", "chat_template_kwargs": {}}),
        (PromptData(), {"kind": "lit_grpo.RubricData"}),
        (AdditionData(2), {"chat": False}),
        (PromptData(), {"path": "gone"}),
        (PromptData(), {"path": None}),
    ],
    ids=["same", "empty", "other data", "built-in task", "no directory", "random weights"],
)
def test_the_same_format_or_one_that_cannot_be_compared_is_not_warned_of(
    data, settings, tmp_path, caplog
):
    assert warning_of(tmp_path, caplog, data, **settings) == ""
