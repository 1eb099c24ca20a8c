"""The script with a failing judge: its checks fail when they should, and a real run passes them."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch

script, checks, toy = (
    importlib.import_module(name) for name in ("failing_judge", "_checks", "_toy_judge")
)

NUM_STEPS = 2


def output(**changes):
    """The output of a good run: two steps of two rows, one of them without a score."""
    completions = pd.DataFrame(
        {
            "completion": ["12", "1a", "ab", "34"],
            "outcome/judge": ["ok", "ok", "timeout", "ok"],
            "score/judge": [1.0, 0.5, None, 1.0],
            "reward": [1.0, 0.5, None, 1.0],
            "advantage": [0.5, -0.5, None, None],
        }
    )
    run = script.RunOutput(
        completions=completions,
        metrics=pd.DataFrame({"reward/mean": [0.5, 0.9]}),
        num_attempts=script.NUM_ATTEMPTS_DOWN,
        weights_before=[torch.ones(2)],
        weights_after=[torch.ones(2)],
        num_optimizer_steps=NUM_STEPS,
        stop_reason="",
        calls={"verdict": 7, "rate_limited": 2, "empty": 1},
    )
    return replace(run, **changes)


def with_cells(row, **cells):
    """The good run with other values in one row of its completions."""
    completions = output().completions
    for column, value in cells.items():
        completions.loc[row, column.replace("__", "/")] = value
    return output(completions=completions)


def failed_checks(run, num_steps=NUM_STEPS):
    return checks.failed_checks(script.check_run(run, num_steps))


def test_all_checks_pass_with_a_good_run():
    assert failed_checks(output()) == set()


SCORED, ABSENT = 0, 2
FAILING_RUNS = {
    "calls failed": {
        "hardly any did": output(calls={"verdict": 10**6, "empty": 1}),
    },
    "every score is the judge's": {
        "one is another": with_cells(SCORED, score__judge=0.05),
        "one is missing": with_cells(SCORED, score__judge=None),
    },
    "no zero was invented": {
        "an absent score is 0": with_cells(ABSENT, score__judge=0.0),
    },
    "an absent score has no reward and no advantage": {
        "it has a reward": with_cells(ABSENT, reward=0.0),
        "it has an advantage": with_cells(ABSENT, advantage=-0.5),
        "no score is absent": output(completions=output().completions.drop(index=ABSENT)),
    },
    "the policy learned": {
        "the reward stayed": output(metrics=pd.DataFrame({"reward/mean": [0.5, 0.5]})),
    },
    "the outage was waited out": {
        "it ended too soon": output(num_attempts=script.NUM_ATTEMPTS_DOWN - 1),
    },
    "the outage did not change the policy": {
        "it did": output(weights_after=[torch.ones(2) + 1e-6]),
        "its weights were not recorded": output(weights_before=[], weights_after=[]),
    },
    "the run made all its steps": {
        "an optimizer step is missing": output(num_optimizer_steps=NUM_STEPS - 1),
        "it was stopped": output(stop_reason="the judge is down"),
        "a step was not logged": output(metrics=pd.DataFrame({"reward/mean": [0.5, 0.8, 0.9]})),
    },
}
"""Check -> case -> a run with which it must fail."""
ALSO_FAILING = {
    "an absent score is 0": {"an absent score has no reward and no advantage"},
}
"""Case -> other checks that fail with it."""


def test_every_check_has_a_run_with_which_it_fails():
    assert FAILING_RUNS.keys() == script.check_run(output(), NUM_STEPS).keys()


@pytest.mark.parametrize(
    ("check", "case"), [(check, case) for check, cases in FAILING_RUNS.items() for case in cases]
)
def test_a_check_fails_with_a_run_that_does_not_pass_it(check, case):
    assert failed_checks(FAILING_RUNS[check][case]) == {check} | ALSO_FAILING.get(case, set())


def test_the_grade_of_an_answer_is_never_zero():
    assert [toy.grade(answer) for answer in ("", "ab", "1a", "12")] == [1, 1, 5, 10]


def test_the_toy_judge_counts_its_answers_and_ends_with_its_context():
    with toy.toy_judge() as judge:
        judge.set(is_down=True)
        with pytest.raises(OSError, match="503"):
            toy.urlopen(toy.Request(f"{judge.url}/v1/chat/completions", b"{}"), timeout=10)
        assert judge.counts() == {"unavailable": 1}
    with pytest.raises(OSError, match="refused"):
        judge.counts()


def test_the_toy_judge_exits_with_its_parent():
    command = [sys.executable, toy.__file__, json.dumps({})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert int(process.stdout.readline()) > 0
        process.stdin.close()  # as the kernel does when the parent has ended
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_real_run_passes_all_checks(tmp_path):
    num_steps = 6
    run = script.train(tmp_path, num_steps)
    # Six steps are too few for the policy to learn in every run.
    assert failed_checks(run, num_steps) <= {"the policy learned"}


def test_help_describes_the_script(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["failing_judge.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        script.main()
    assert "30%" in capsys.readouterr().out
