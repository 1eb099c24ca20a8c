"""Rewards and judges that a run starts: where, with what keys, and offline not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_runs import doctor, judged, rewarded
from judge_server import JudgeServer, judges

KEY = "KEY_OF_A_SERVICE"


def in_worker(class_path: str, **settings) -> str:
    inner = {"class_path": class_path, "init_args": settings}
    return rewarded("ProcessReward", reward=inner, num_workers=1)


WHERE = {
    "a worker": in_worker("code_rewards.NeedsKey"),
    "this process": rewarded("code_rewards.NeedsKey"),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_a_reward_is_started_where_the_run_starts_it(where, monkeypatch, capsys):
    monkeypatch.setenv(KEY, "secret")
    exit_code, shown = doctor(capsys, WHERE[where])
    assert exit_code == 0
    assert f"needs_key starts in {where}" in shown["credentials"]
    # It has no check(), whatever wraps it.
    known = "can score the training prompts is not known: no method check(prompts) says so."
    assert f"Whether needs_key {known}" in shown["data"]
    assert "needs_key can score every" not in shown["data"]


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_a_key_that_a_reward_lacks_when_it_starts_is_failed(where, monkeypatch, capsys):
    monkeypatch.delenv(KEY, raising=False)
    exit_code, shown = doctor(capsys, WHERE[where])
    assert exit_code == 1
    assert f"KeyError: '{KEY}'" in shown["credentials"]
    assert shown["summary"].strip() == "Do not start yet: credentials failed."


RECORDING = ("code_rewards.RecordsHooks", {"file": "hooks.txt"})


@pytest.mark.parametrize(
    ("make", "is_accuracy"),
    [
        pytest.param(in_worker, False, marks=pytest.mark.slow),
        (rewarded, False),
        (rewarded, True),
    ],
)
def test_offline_no_reward_of_the_user_s_is_started(make, is_accuracy, capsys):
    reward = make(RECORDING[0], **RECORDING[1])
    if is_accuracy:
        (key, value) = reward.split("=", 1)
        reward = f"--model.evaluation.accuracy={value[1:-1]}"
    which = "held-out" if is_accuracy else "training"
    exit_code, shown = doctor(capsys, reward, "--offline")
    assert exit_code == 0
    assert "records_hooks: not started (--offline)" in shown["credentials"]
    known = f"can score the {which} prompts is not known: it was not started, as credentials says."
    assert f"Whether records_hooks {known}" in shown["data"]
    assert not Path("hooks.txt").exists()
    exit_code, shown = doctor(capsys, reward)
    assert exit_code == 0
    assert f"records_hooks can score every {which} prompt" in shown["data"]
    assert Path("hooks.txt").read_text().count("check") == 1


def test_a_blind_judge_is_failed_and_asked_nothing_offline(capsys):
    with JudgeServer(judges("answer", lambda request, one: {"score": 5})) as server:
        exit_code, shown = doctor(capsys, judged(f"{server.url}/v1"), "--offline")
        assert exit_code == 0
        assert server.requests == []
        assert "1 judge(s) not asked (--offline)" in shown["judge"]
        _, shown = doctor(capsys, judged(f"{server.url}/v1"), "--offline", "--probe")
        assert "Not tried (--offline): it would ask a judge" in shown["probe"]
        assert server.requests == []
        exit_code, shown = doctor(capsys, judged(f"{server.url}/v1"))
    assert exit_code == 1
    assert "the judge does not tell good from bad" in shown["judge"]
    assert f"model m at {server.url}/v1" in shown["credentials"]


def test_a_missing_key_of_a_judge_is_failed(monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    exit_code, shown = doctor(capsys, judged("http://127.0.0.1:1/v1", auth="key"), "--offline")
    assert exit_code == 1
    assert "must be in the environment variable OPENAI_API_KEY" in shown["credentials"]
