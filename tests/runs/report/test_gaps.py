"""What a report says of a run that has lost rows of its metrics or files of completions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from logged_runs import HOLD, row, write_run
from processes import running
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.runs.report import gaps
from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.report import report
from lit_grpo.runs.report.summary import gap_notes, summary_row

EACH_STEP = {"trainer": {"log_every_n_steps": 1, "accumulate_grad_batches": 1}}
METRICS = {
    "resumes": [0] * 9,
    "reward/mean": [0.5] * 9,
    "completions/mean_length": [2.0] * 9,
    "perf/tokens_per_second": [1.0] * 9,
    "timing/step_duration_s": [2.0] * 9,
}
COMPLETIONS = {step: [row(group=0)] for step in range(9)}


def keep_rows(run: Path, *steps: int, cut: str = "") -> Path:
    header, *rows = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join([header, *(rows[step] for step in steps), cut]))
    return run


def make_run(path: Path, **given) -> Path:
    return write_run(path / "my" / "0", METRICS, **{"config": EACH_STEP, **given})


def shown(run: Path, read_up_to: int | None = None) -> tuple[list[str], list[str]]:
    """Return what a report says of steps, time and tokens, and its notes."""
    runs = load_runs([run], read_up_to)
    return list(summary_row(runs[0])[1:4]), gap_notes(runs)


def test_a_whole_run_has_no_gaps(tmp_path):
    assert shown(make_run(tmp_path, completions=COMPLETIONS)) == (["9", "14 s", "18"], [])


def test_rows_that_are_missing_in_between_are_named_and_not_summed(tmp_path):
    run = keep_rows(make_run(tmp_path, completions=COMPLETIONS), 0, 1, 8)
    cells, (note,) = shown(run)
    assert cells == ["3 of 9", "14 s", "18"]
    assert note == (
        "my/0: metrics.csv has no rows for 6 of the 9 steps (3 to 8). Curves and totals omit "
        "these steps, except for the time, and for the tokens if completions/ has every step."
    )
    (run / "completions/step_000004.parquet").unlink()
    assert shown(run)[0][2] == "–"


@pytest.mark.parametrize(
    ("resumes", "expected"),
    [
        ([0] * 9, "14 s"),
        ([1] * 9, "≥ 14 s"),  # without the first step
        ([0] * 4 + [1] * 5, "≥ 14 s"),
        ([0] * 8 + [1], "≥ 14 s"),
        ([None] * 9, "≥ 14 s"),  # of an older version
    ],
)
def test_the_time_is_that_of_the_last_row_unless_a_resumption_has_not_found_the_lost_ones(
    tmp_path, resumes, expected
):
    config = {"config": EACH_STEP}
    run = keep_rows(write_run(tmp_path / "0", METRICS | {"resumes": resumes}, **config), 1, 2, 8)
    assert shown(run)[0][1] == expected


@pytest.mark.parametrize("kind", ["done", "stop"])
def test_rows_that_are_missing_at_the_end_are_known_by_the_last_event(tmp_path, kind):
    run = make_run(tmp_path, events=[{"step": 9, "kind": kind}])
    cells, notes = shown(keep_rows(run, 0, 1, cut="2,4.5,0."))
    assert cells == ["2 of 9", "≥ 3 s", "–"]
    assert (
        "7 of the 9 steps (3 to 9). Curves and totals omit these steps, except for the tokens"
        in notes[0]
    )
    assert notes[1:] == ["my/0: line 4 of metrics.csv is cut off, and left out."]
    assert shown(run, 2) == (["2", "3 s", "4"], notes[1:])
    assert "5 of the 7 steps (3 to 7)" in shown(run, 7)[1][0]


def test_rows_that_are_missing_at_the_end_are_known_by_the_completions(tmp_path):
    run = keep_rows(make_run(tmp_path, completions=COMPLETIONS), 0, 1, 3)
    (read,) = load_runs([run])
    assert read.gaps.lost_steps == [3, 5, 6, 7, 8]  # step 9 may not have been finished
    assert "5 of the 8 steps (3, 5 to 8)" in shown(run)[1][0]


@pytest.mark.parametrize("seldom", [{"log_every_n_steps": 4}, {"accumulate_grad_batches": 4}])
def test_a_run_that_does_not_log_each_batch_has_lost_none(tmp_path, seldom):
    seldom = {"trainer": EACH_STEP["trainer"] | seldom}
    run = keep_rows(make_run(tmp_path, config=seldom, events=[{"step": 9, "kind": "done"}]), 3, 7)
    assert shown(run) == (["8", "12 s", "4"], [])
    (run / "config.yaml").rename(run / "config.0.yaml")
    assert shown(run)[1] == []
    (run / "config.yaml").write_text(yaml.safe_dump(EACH_STEP))  # of its resumption
    assert shown(run)[1] == []
    (run / "config.0.yaml").unlink()
    assert len(shown(run)[1]) == 1
    (run / "config.yaml").unlink()
    assert shown(run)[1] == []


@pytest.mark.slow
def test_a_live_run_may_be_ahead_of_its_metrics(tmp_path):
    run = keep_rows(make_run(tmp_path, completions=COMPLETIONS), 0, 1, cut="2,")
    (run / "completions/step_000008.parquet").write_bytes(b"")
    assert len(shown(run)[1]) == 3
    early = load_runs([run])
    with running([sys.executable, "-c", HOLD, str(run)]) as holder:
        assert holder.stdout.readline() == "held\n"
        assert shown(run) == (["2", "3 s", "4"], [])
        assert gap_notes(early) == []
        read = load_runs([run])
    holder.wait()
    assert list(summary_row(*read)[1:4]) == ["2", "3 s", "4"]  # of the rows that it had then
    assert gap_notes(read) == []


def test_a_run_is_asked_once_what_it_has_lost(tmp_path, monkeypatch):
    asked = []
    run = make_run(tmp_path, completions=COMPLETIONS)
    monkeypatch.setattr(gaps, "damaged_files", lambda run_dir: asked.append(run_dir) or [])
    report([keep_rows(run, 0, 1, 8)])
    assert asked == [run]


def test_files_of_completions_that_cannot_be_read_are_named(tmp_path, capsys):
    run = make_run(tmp_path, completions=COMPLETIONS)
    first, second = (run / f"completions/step_00000{step}.parquet" for step in (3, 5))
    first.write_bytes(b"")
    note = f"my/0: {first} cannot be read, and its completions are left out."
    report([run])
    assert note in capsys.readouterr().out.replace("\n", " ")
    assert note in (run / "report.html").read_text()
    second.write_bytes(second.read_bytes()[:-9])
    assert "step_000003.parquet (and 1 more) cannot be read" in shown(run)[1][0]


@pytest.mark.slow
def test_a_real_run_that_goes_on_after_its_metrics_were_cut_says_what_is_missing(tmp_path, capsys):
    with workplace(tmp_path):
        Path("my.yaml").write_text(yaml.safe_dump(BASE))
        assert main(["fit", "--config=my.yaml", "--run_dir=run", "--trainer.max_steps=4"]) == 0
        assert main(["report", "run"]) == 0
        assert "metrics.csv" not in capsys.readouterr().out
        keep_rows(Path("run"), 0, cut="1,0.")
        assert shown(Path("run"))[0][0] == "1 of 4"
        assert main(["fit", "run", "--trainer.max_steps=5"]) == 0
        capsys.readouterr()
        assert main(["report", "run"]) == 0
        said = capsys.readouterr().out
    assert "2 of 5" in said
    assert "metrics.csv has no rows for 3 of the 5 steps (2 to 4)" in said
