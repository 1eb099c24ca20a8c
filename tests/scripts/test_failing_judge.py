"""The run beside a failing judge, and that its findings would notice what they deny."""

import importlib
import subprocess
import sys
from dataclasses import replace

import pytest
from paths import ROOT

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
NUM_STEPS = 6


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("failing_judge")


@pytest.fixture(scope="module")
def evidence(script, tmp_path_factory):
    return script.train(tmp_path_factory.mktemp("run"), NUM_STEPS)


def denied(script, evidence) -> set[str]:
    return importlib.import_module("_findings").denied(script.findings(evidence, NUM_STEPS))


@pytest.mark.slow
def test_no_reward_is_invented_and_no_step_is_taken_on_absent_scores(script, evidence):
    # Six steps are too few to be sure that it learned.
    assert denied(script, evidence) <= {"it learned"}


@pytest.mark.slow
def test_an_invented_zero_would_be_found(script, evidence):
    rows = evidence.completions.reset_index(drop=True)
    absent = rows.index[rows["outcome/judge"] != "ok"][0]
    rows.loc[absent, ["score/judge", "reward", "advantage"]] = 0.0
    found = denied(script, replace(evidence, completions=rows))
    assert {"no zero was invented", "an absent score has no reward and no advantage"} <= found


@pytest.mark.slow
def test_a_score_that_is_not_the_judge_s_would_be_found(script, evidence):
    rows = evidence.completions.reset_index(drop=True)
    scored = rows.index[rows["outcome/judge"] == "ok"][0]
    rows.loc[scored, "score/judge"] = 0.05
    assert "every score is the judge's" in denied(script, replace(evidence, completions=rows))


@pytest.mark.slow
def test_a_policy_that_moved_on_the_outage_would_be_found(script, evidence):
    moved = replace(evidence, weights_after=[one + 1e-6 for one in evidence.weights_after])
    assert "the policy did not move on it" in denied(script, moved)


@pytest.mark.slow
def test_a_policy_that_nobody_looked_at_would_be_found(script, evidence):
    unseen = replace(evidence, weights_before=[], weights_after=[])
    assert "the policy did not move on it" in denied(script, unseen)


@pytest.mark.slow
def test_a_judge_that_hardly_failed_would_be_found(script, evidence):
    well = replace(evidence, calls=evidence.calls | {"verdict": 10**6})
    assert "calls failed" in denied(script, well)


@pytest.mark.slow
def test_a_run_that_learned_nothing_would_be_found(script, evidence):
    metrics = evidence.metrics.assign(**{"reward/mean": 0.5})
    assert "it learned" in denied(script, replace(evidence, metrics=metrics))


@pytest.mark.slow
def test_an_outage_that_ended_too_soon_would_be_found(script, evidence):
    soon = replace(evidence, num_attempts=script.NUM_ATTEMPTS_DOWN - 1)
    assert "the outage was waited out" in denied(script, soon)


@pytest.mark.slow
def test_a_run_that_ended_early_would_be_found(script, evidence):
    early = replace(evidence, num_optimizer_steps=NUM_STEPS - 1)
    stopped = replace(evidence, stop_reason="the judge is down")
    unlogged = replace(evidence, metrics=evidence.metrics.iloc[:-1])
    for run in (early, stopped, unlogged):
        assert "the run ended right" in denied(script, run)


def test_the_toy_judge_ends_with_whoever_started_it():
    toy = importlib.import_module("_toy_judge")
    with toy.toy_judge() as judge:
        assert judge.counts() == {}
    with pytest.raises(OSError, match="refused"):
        judge.counts()


def test_the_script_says_what_it_does():
    command = [sys.executable, str(SCRIPTS / "failing_judge.py"), "--help"]
    assert "30%" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
