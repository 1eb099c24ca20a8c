from __future__ import annotations

import sys

import pytest
from logged_runs import HOLD, write_run
from processes import running

from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.page.diagnosis import diagnose, find_marks

START = {"step": 0, "kind": "start"}


def make_run(path, events=(), **metrics):
    return load_runs(
        [write_run(path / "run" / "0", {"reward/mean": [0.5] * 4} | metrics, events=events)]
    )[0]


@pytest.mark.parametrize(
    ("events", "state", "end"),
    [
        ((), "unknown", "It has no events.jsonl, so how it ended is not known. See run.log."),
        ([START], "unknown", "No end was recorded after step 4: its process was killed."),
        ([START, {"step": 4, "kind": "done"}], "done", "Done."),
        ([START, {"step": 3, "kind": "stop", "message": "No reward."}], "stop", "No reward."),
        (
            [START, {"step": 3, "kind": "crash", "message": "ValueError: x"}],
            "crash",
            "ValueError: x",
        ),
    ],
)
def test_how_a_run_ended(tmp_path, events, state, end):
    found = diagnose(make_run(tmp_path, events))
    assert (found.state, found.end) == (state, end)


@pytest.mark.parametrize(("read_up_to", "step"), [(2, "step 2 or later"), (9, "step 4")])
def test_the_last_step_of_a_killed_run_may_not_be_among_those_that_were_read(
    tmp_path, read_up_to, step
):
    run = make_run(tmp_path, [START])
    (limited,) = load_runs([run.path], read_up_to)
    end = f"No end was recorded after {step}: its process was killed."
    assert diagnose(limited).end == end


@pytest.mark.slow
def test_a_run_whose_process_lives_is_running(tmp_path):
    run = make_run(tmp_path, [START, {"step": 3, "kind": "stop"}])
    with running([sys.executable, "-c", HOLD, str(run.path)]) as process:
        assert process.stdout.readline() == "held\n"
        assert diagnose(*load_runs([run.path])).state == "running"
    process.wait()
    assert diagnose(*load_runs([run.path])).state == "stop"


def test_alerts_are_counted_by_cause_the_most_frequent_first(tmp_path):
    alerts = [("truncated", 1, "a"), ("", 2, "b"), ("truncated", 3, "c")]
    events = [{"kind": "alert", "cause": c, "step": s, "message": m} for c, s, m in alerts]
    one, other = diagnose(make_run(tmp_path, events)).causes
    assert (one.name, one.num_events, one.first_step, one.last_step, one.message) == (
        "truncated", 2, 1, 3, "c",
    )  # fmt: skip
    assert (other.name, other.num_events) == ("(no cause given)", 1)


def test_warnings_are_counted_apart_from_alerts_and_after_them(tmp_path):
    kinds = ["warning", "warning", "alert"]
    events = [{"kind": k, "cause": "truncated", "step": n} for n, k in enumerate(kinds, 1)]
    run = make_run(tmp_path, events)
    assert [(one.kind, one.num_events) for one in diagnose(run).causes] == [
        ("alert", 1),
        ("warning", 2),
    ]
    assert [(mark.kind, mark.step, mark.is_drawn) for mark in find_marks(0, run)] == [
        ("warning", 1, True),
        ("warning", 2, True),
        ("alert", 3, True),
    ]


def test_events_and_restarts_of_servers_are_marked_by_step(tmp_path):
    events = [START, {"step": 3, "kind": "alert", "message": "x"}, {"step": 4, "kind": "done"}]
    run = make_run(tmp_path, events, **{"rollout/restarts": [0, 2, 0, 1]})
    marks = find_marks(5, run)
    assert [(mark.step, mark.kind, mark.is_drawn) for mark in marks] == [
        (0, "start", False),
        (2, "restart", True),
        (3, "alert", True),
        (4, "done", False),
        (4, "restart", True),
    ]
    assert marks[1].message == "2 restarts of inference servers"
    assert marks[4].message == "1 restart of inference servers"
    assert (marks[0].run, marks[0].time) == (5, "2026-11-23 16:05:01")


def test_events_after_the_steps_that_are_shown_are_not_marked(tmp_path):
    run = make_run(tmp_path, [START, {"step": 4, "kind": "done"}])
    (limited,) = load_runs([run.path], 2)
    assert [mark.kind for mark in find_marks(0, limited)] == ["start"]
