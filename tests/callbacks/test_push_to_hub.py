"""Uploads by the real client to a local Hub, after small real runs."""

from __future__ import annotations

import logging
import shlex

import pytest
from fake_hub import TOKEN, serving_hub
from lightning.pytorch.callbacks import Callback
from run_logs import close_logs
from small_runs import make_module

from lit_grpo import AdditionData, Trainer
from lit_grpo.callbacks import PushToHub
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason, UserError

REPO = "me/my-model"


@pytest.fixture
def hub(monkeypatch):
    with serving_hub(monkeypatch) as hub:
        yield hub


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="lit_grpo.callbacks.push_to_hub")
    return caplog


def train(run_dir, *callbacks):
    data = AdditionData(1, train_size=4, validation_size=0, prompts_per_step=2)
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "max_steps": 1}
    trainer = Trainer(run_dir, callbacks=list(callbacks), **settings)
    try:
        trainer.fit(make_module(group_size=2), data)
    finally:
        close_logs()
    return trainer


def test_the_final_model_and_its_card_are_uploaded(hub, tmp_path):
    train(tmp_path, PushToHub(REPO))
    assert hub.is_private
    written = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= written.keys()
    assert hub.files == written
    assert "uploaded:" in (tmp_path / "run.log").read_text()


def test_a_failed_upload_is_a_warning_with_the_command_that_repeats_it(hub, warnings, tmp_path):
    hub.fails = True
    trainer = train(tmp_path, PushToHub(REPO, private=False))
    assert not hub.is_private
    assert trainer.stop_reason is None
    assert (tmp_path / "final/model.safetensors").exists()
    command = warnings.messages[-1].partition("Repeat it with: ")[2]
    final = str(tmp_path / "final")
    assert shlex.split(command) == ["hf", "upload", REPO, final, ".", "--no-private"]
    assert TOKEN not in warnings.text


def test_a_missing_token_is_reported_at_the_start(hub, warnings, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    train(tmp_path / "run", PushToHub(REPO))
    assert "PushToHub finds no token" in warnings.messages[0]
    assert "The upload to me/my-model failed" in warnings.messages[-1]


def test_a_stopped_run_uploads_nothing(hub, tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            stop_run(trainer, StopReason(exit_code=20, message="enough"))

    train(tmp_path, PushToHub(REPO), Stop())
    assert hub.created == []


@pytest.mark.parametrize("repo_id", ["a/b/c", "me/my model", "me/my--model"])
def test_an_invalid_id_is_refused(repo_id):
    with pytest.raises(UserError, match="repo_id must be an id such as me/my-model, got"):
        PushToHub(repo_id)
