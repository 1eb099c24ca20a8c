"""Whole runs of the command line whose reward is a judge behind real HTTP."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml
from diskcache import Cache
from judge_server import JudgeServer, judges, refuses
from run_logs import workplace
from tiny import LLAMA
from worker_processes import wait_until

from lit_grpo.__main__ import main

KEY = "sk-a-key-that-must-not-be-written"

by_length = judges("answer", lambda request, section: {"score": len(section.text) % 11})


@pytest.fixture(autouse=True)
def _workplace(tmp_path):
    with workplace(tmp_path) as patch:
        patch.setenv("MY_JUDGE_KEY", KEY)
        yield


WORDS = ["fit", "--config=my.yaml", "--run_dir=run"]


def fit(server, *arguments, **judge) -> int:
    write_config(server, **judge)
    return main([*WORDS, *arguments])


def write_config(server, *, every_n_steps: int | None = None, **judge) -> None:
    judge = {
        "model": "m",
        "base_url": f"{server.url}/v1",
        "secret_variable": "MY_JUDGE_KEY",
        "price": {"prompt": 1.0, "completion": 10.0},
    } | judge
    reward = {"class_path": "JudgeReward", "init_args": {"judge": judge}}
    saving = {"dirpath": "run/checkpoints", "every_n_steps": every_n_steps}
    checkpoint = {"class_path": "Checkpoints", "init_args": saving}
    config = {
        "trainer": {"accelerator": "cpu", "max_steps": 4, "callbacks": [checkpoint]},
        "model": {
            "policy": {"architecture": LLAMA},
            "rewards": [reward],
            "group_size": 4,
            "sampling": {"max_tokens": 3},
            "outage": {"give_up_after_seconds": 0},
            "evaluation": {"before_training": False},
        },
        "data": {
            "class_path": "AdditionData",
            "init_args": {"num_digits": 1, "validation_size": 4, "prompts_per_step": 2},
        },
    }
    with open("my.yaml", "w") as file:
        yaml.safe_dump(config, file)


def test_a_judged_run_trains_counts_and_writes_no_secret(tmp_path):
    with JudgeServer(by_length) as server:
        assert fit(server) == 0
        assert all(one.headers["authorization"] == f"Bearer {KEY}" for one in server.requests)
        num_calls = len(server.requests)
    metrics = pd.read_csv("run/metrics.csv")
    assert len(metrics) == 4
    assert (metrics["reward/judge/ok_fraction"] == 1).all()
    # The check of the connection counts as a call of the first step.
    assert metrics["judge/calls"].sum() == num_calls
    assert metrics["judge/cost_usd"].sum() == pytest.approx(num_calls * 0.0002)
    rows = pd.concat(map(pd.read_parquet, tmp_path.glob("run/completions/*")))
    assert (rows["score/judge"] == rows.completion.str.len() % 11 / 10).all()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert KEY.encode() not in path.read_bytes(), path


def test_a_judge_that_denies_access_ends_the_run_before_it_begins(capsys):
    with JudgeServer() as server:
        server.script(refuses(401))
        assert fit(server) == 2
        assert len(server.requests) == 1
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "error:" in one]
    assert "answered 401 for model 'm'" in line
    assert "MY_JUDGE_KEY" in line
    assert KEY not in line


def test_a_missing_key_is_an_error_of_one_line(monkeypatch, capsys):
    monkeypatch.delenv("MY_JUDGE_KEY")
    with JudgeServer() as server:
        assert fit(server) == 2
        assert not server.requests
    assert re.search(r"error: .*MY_JUDGE_KEY, which is not set", capsys.readouterr().err)


@pytest.mark.slow
def test_a_spent_budget_stops_a_run_with_a_checkpoint_and_is_still_spent_when_resumed():
    limits = {"max_cost_usd": 0.0025, "max_concurrency": 1}  # 13 calls, of 8 a step
    with JudgeServer(by_length) as server:
        assert fit(server, limits=limits) == 4
        assert "the judge's budget is spent" in Path("run/run.log").read_text()
        assert len(server.requests) == 13
        assert len(pd.read_csv("run/metrics.csv")["policy/loss"].dropna()) == 1
        assert fit(server, "--ckpt_path=last", limits=limits) == 4
        # One call checks the connection before the checkpoint is loaded.
        assert len(server.requests) == 14
        assert fit(server, "--ckpt_path=last", limits={"max_cost_usd": 1}) == 0
    assert len(pd.read_csv("run/metrics.csv")["policy/loss"].dropna()) == 4


@pytest.mark.slow
def test_a_run_killed_while_it_scores_pays_no_answer_twice_if_it_has_a_cache(tmp_path, importer):
    settings = {"cache": str(tmp_path / "cache"), "every_n_steps": 1}
    num_answered = 8 + 3  # the first step, and some of the second

    def answer_some(request):
        is_held = server.questions.index(request) >= num_answered
        return replace(by_length(request), seconds=600 if is_held else 0)

    with JudgeServer(answer_some) as server:
        write_config(server, **settings)
        words, key = [*WORDS, "--ckpt_path=auto"], {"MY_JUDGE_KEY": KEY}
        with importer.running(words, tmp_path, **key) as started:
            verdicts = Cache(tmp_path / "cache")
            wait_until(lambda: len(server.questions) > num_answered + 1, 120)
            wait_until(lambda: len(verdicts) == num_answered)
            started.kill()
            assert started.wait() == [-signal.SIGKILL]
        asked = [content(one) for one in server.questions]
        assert len({*asked}) == len(asked)
        server.requests.clear()
        server.behaviour = by_length
        assert fit(server, "--ckpt_path=auto", **settings) == 0
        again = {content(one) for one in server.questions}
    assert not again & {*asked[:num_answered]}
    assert again >= {*asked[num_answered:]}


@pytest.mark.slow
def test_what_a_killed_run_has_spent_since_its_checkpoint_is_not_spent_again(tmp_path, importer):
    """Without a checkpoint the run begins anew, and with the whole cost of the part before."""
    limits = {"max_cost_usd": 0.0035, "max_concurrency": 1}  # 18 calls, of 8 a step

    def answer_some(request):
        return replace(by_length(request), seconds=600 if len(server.questions) > 11 else 0)

    with JudgeServer(answer_some) as server:
        write_config(server, limits=limits)
        words, key = [*WORDS, "--ckpt_path=auto"], {"MY_JUDGE_KEY": KEY}
        with importer.running(words, tmp_path, **key) as started:
            wait_until(lambda: len(server.questions) > 11, 120)
            started.kill()
            assert started.wait() == [-signal.SIGKILL]
        num_answered = len(server.requests) - 1
        server.behaviour = by_length
        assert fit(server, "--ckpt_path=auto", limits=limits) == 4
        # The last call was not answered; one more may start before the limit is passed.
        assert num_answered < 18 <= len(server.requests) - 1 <= 19
    assert "the judge's budget is spent" in Path("run/run.log").read_text()


def content(request) -> tuple[str, ...]:
    """Return what was asked, without what is drawn for each request."""
    return tuple(section.text for section in request.sections)


def test_a_judge_that_answers_again_lets_the_training_go_on_without_a_zero():
    def down_for_a_while(request):
        return refuses(503, "overloaded") if len(server.questions) <= 12 else by_length(request)

    with JudgeServer(down_for_a_while) as server:
        waits = ["--model.outage.give_up_after_seconds=60"]
        waits += ["--model.outage.first_pause_seconds=0.2"]
        assert fit(server, *waits, limits={"num_retries": 0}) == 0
    log = Path("run/run.log").read_text()
    assert log.index("Retrying now") < log.index("Enough scores have arrived: training goes on")
    assert len(pd.read_csv("run/metrics.csv")) == 4
    rows = pd.read_parquet("run/completions")
    assert ((rows["outcome/judge"] == "unavailable") == rows["reward"].isna()).all()
    assert (rows["outcome/judge"] == "ok").sum() > len(rows) / 2


def test_a_judge_that_stays_down_stops_the_run_with_its_cause():
    with JudgeServer(lambda request: refuses(503, "overloaded")) as server:
        server.script(refuses(503, "overloaded"))
        assert fit(server, limits={"num_retries": 0}) == 4
    error = Path("run/run.log").read_text()
    assert "8 of the 8 rows (100%) have no score" in error
    assert "ended as unavailable" in error
    assert "overloaded" in error
