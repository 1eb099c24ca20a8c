"""A Hub that does not answer, for the real libraries that ask it."""

from __future__ import annotations

import time

import pytest
from doctor_runs import doctor, policy_from
from http_answers import answering
from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled

from lit_grpo.__main__ import main
from lit_grpo.cli.doctor.hub import asking_the_hub_once

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def hub_at(monkeypatch):
    def set_address(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    return set_address


def test_a_hub_that_does_not_answer_fails_the_model_at_once(hub_at, capsys):
    hub_at(NOBODY)
    start = time.monotonic()
    exit_code, shown = doctor(capsys, *policy_from("someone/a-model"))
    assert time.monotonic() - start < 10
    assert exit_code == 1
    assert "no tokenizer could be loaded from 'someone/a-model'" in shown["model"]
    assert "couldn't connect" in shown["model"]
    assert not constants.HF_HUB_OFFLINE


def test_a_plan_of_a_model_of_a_hub_that_does_not_answer_is_refused_at_once(hub_at, capsys):
    hub_at(NOBODY)
    start = time.monotonic()
    arguments = ["--gpus=H100", *policy_from("someone/a-model")]
    assert main(["plan", "--config=base.yaml", *arguments]) == 2
    assert time.monotonic() - start < 10
    shown = capsys.readouterr().err
    assert "no model could be loaded from 'someone/a-model'" in shown


def test_after_the_first_request_nothing_is_asked_of_a_hub_that_does_not_answer(hub_at):
    hub_at(NOBODY)
    hooks = get_session().event_hooks
    with answering({"GET /file": b"here"}) as url, asking_the_hub_once():
        for _ in range(2):
            with pytest.raises(OfflineModeIsEnabled):
                get_session().get(f"{url}/file")
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert get_session().event_hooks == hooks


def test_a_hub_that_answers_is_asked_as_ever(hub_at):
    with answering({"GET /file": b"here"}) as url:
        hub_at(url)
        with asking_the_hub_once():
            assert get_session().get(f"{url}/file").content == b"here"
        assert not constants.HF_HUB_OFFLINE
