"""Paths and names that no model can be loaded from, each with what to set."""

import pytest
from tiny import tiny_policy

from lit_grpo.policy import Policy
from lit_grpo.types import UserError


def test_a_directory_without_a_model_is_refused(tmp_path):
    policy = Policy(path=str(tmp_path))
    expected = r"a tokenizer's files, such as tokenizer\.json, got one with nothing"
    with pytest.raises(ValueError, match=expected):
        policy.tokenizer  # noqa: B018 - the property loads
    tiny_policy().tokenizer.save_pretrained(tmp_path)
    expected = r"a model's files.* got one with .*tokenizer\.json.*Set model\.policy\.path"
    with pytest.raises(ValueError, match=expected):
        policy.load(with_reference=False)


def test_a_file_is_not_requested_from_the_hub(tmp_path):
    path = tmp_path / "train.jsonl"
    path.touch()
    with pytest.raises(ValueError, match=r"must be a directory or a hub id, got a file"):
        Policy(path=str(path)).load(with_reference=False)


def test_of_the_directory_of_a_run_its_model_is_suggested(tmp_path):
    (tmp_path / "final").mkdir()
    with pytest.raises(ValueError, match=f"Set model.policy.path to {tmp_path}/final"):
        Policy(path=str(tmp_path)).load(with_reference=False)


@pytest.mark.parametrize("path", ["runs/nowhere/0/final", "./nowhere", "/no/where"])
def test_a_path_that_does_not_exist_is_not_requested_from_the_hub(path):
    policy = Policy(path=path)
    with pytest.raises(ValueError, match="there is no such directory"):
        policy.load(with_reference=False)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        policy.tokenizer  # noqa: B018 - the property loads


def test_a_name_without_an_organisation_is_asked_for_once_if_the_hub_does_not_answer(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    expected = r"from 'Qwen': there is no such directory, and http://127.0.0.1:9 does not answer"
    with pytest.raises(ValueError, match=expected):
        Policy(path="Qwen").tokenizer  # noqa: B018 - the property loads


def test_a_name_that_the_hub_could_not_have_is_refused_in_words():
    with pytest.raises(ValueError, match="no tokenizer could be loaded from 'my model'"):
        Policy(path="my model").tokenizer  # noqa: B018 - the property loads


@pytest.mark.parametrize("part", ["", "checkpoints", "checkpoints/last.ckpt"])
def test_a_run_and_its_checkpoints_are_told_where_a_model_is_or_how_to_write_one(tmp_path, part):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/last.ckpt").touch()
    with pytest.raises(UserError, match=rf"lit-grpo checkpoints {run} --export DIRECTORY, and set"):
        Policy(path=str(run / part)).load(with_reference=False)
    (run / "final").mkdir()
    with pytest.raises(UserError, match=rf"Set model\.policy\.path to {run}/final, the model of"):
        Policy(path=str(run / part)).load(with_reference=False)
