"""The lines of a report on how each run ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from logged_runs import HOLD, write_run
from processes import running

from lit_grpo import __main__
from lit_grpo.runs.report.report import report

START = {"step": 0, "kind": "start"}


def shown(capsys) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def make_run(path: Path, *events: dict) -> Path:
    return write_run(path / "grpo" / "0", {"reward/mean": [0.5, 0.75]}, events=[START, *events])


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"kind": "done", "message": "done after step 2: x"}, "done after step 2: x"),
        ({"kind": "stop", "message": "No reward: x:\n- bad\n- y"}, "(stop) No reward: x: …"),
        ({"kind": "crash", "message": "ValueError: x"}, "(crash) ValueError: x"),
        (
            {"kind": "alert", "message": "x"},
            "(unknown) No end was recorded after step 2: its process was killed.",
        ),
    ],
)
def test_the_summary_has_a_line_on_how_the_run_ended(tmp_path, capsys, event, line):
    report([make_run(tmp_path, {"step": 2} | event)])
    lines = shown(capsys)
    assert lines.count(f"grpo/0 {line}") == 1
    assert sum(one.startswith("grpo/0 (") for one in lines) == line.startswith("(")


@pytest.mark.slow
def test_the_summary_of_a_run_that_still_trains_says_so(tmp_path, capsys):
    run = make_run(tmp_path)
    with running([sys.executable, "-c", HOLD, str(run)]) as process:
        assert process.stdout.readline() == "held\n"
        report([run])
    assert "grpo/0 (running) A process trains in this directory." in shown(capsys)


STOPPED = [
    {"time": "2026-11-23T16:05:01", "step": 0, "kind": "start"},
    {"time": "2026-11-23T16:06:01", "step": 0, "kind": "alert", "cause": "judge_outage",
     "message": "waiting for the judge"},
    {"time": "2026-11-23T16:07:01", "step": 0, "kind": "stop", "cause": "scores_absent",
     "message": "all scores are missing"},
]  # fmt: skip


def make_run_without_steps(path: Path, metrics: str | None) -> Path:
    """Write what a run leaves that was stopped in its first step."""
    path.mkdir(parents=True)
    if metrics is not None:
        (path / "metrics.csv").write_text(metrics)
    (path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in STOPPED))
    settings = {"model": {"group_size": 77}, "trainer": {"max_steps": 5}}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    (path / "run.log").write_text("INFO: begun\n")
    return path


@pytest.mark.parametrize(
    ("metrics", "cut"),
    [(None, False), ("", False), ("step,seconds\n", False), ("step,seconds\n0,1.", True)],
)
def test_a_run_that_ended_in_its_first_step_shows_what_there_is(tmp_path, capsys, metrics, cut):
    run = make_run_without_steps(tmp_path / "grpo" / "0", metrics)
    assert __main__.main(["report", str(run)]) == 0
    said = "grpo/0 (stop) all scores are missing Alert (judge_outage): waiting for the judge"
    assert shown(capsys) == [
        "run steps time tokens accuracy reward",
        "grpo/0 0 0 s – – –",
        said,
        *(["grpo/0: line 2 of metrics.csv is cut off, and left out."] if cut else []),
        f"Run {run}",
        f"Page {run}/report.html",
        f"Curves {run}/curves.png",
        f"Config {run}/config.yaml",
        f"Log {run}/run.log",
    ]
    page = (run / "report.html").read_text()
    for text in ("all scores are missing", "waiting for the judge", "group_size 77"):
        assert text in page


def test_a_run_that_failed_before_training_shows_the_error_of_its_log(tmp_path, capsys):
    run = tmp_path / "grpo" / "0"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("")
    (run / "run.log").write_text("INFO: begun\nTraceback …\nValueError: no such model\n\n")
    report([run])
    (line,) = (line for line in shown(capsys) if line.startswith("grpo/0 (unknown)"))
    expected = "It ended before training began. The last line of run.log: ValueError: no such model"
    assert line == f"grpo/0 (unknown) {expected}"


def test_a_run_without_a_step_is_compared_with_others(tmp_path, capsys):
    empty = make_run_without_steps(tmp_path / "grpo" / "0", None)
    report([empty, write_run(tmp_path / "grpo" / "1", {"reward/mean": [0.5, 0.75]})])
    lines = shown(capsys)
    assert lines[1:3] == ["grpo/0 0 0 s – – –", "grpo/1 2 3 s – – 0.500 → 0.750"]
    assert lines[3].startswith("grpo/0 (stop) all scores are missing")
