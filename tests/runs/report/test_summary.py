"""Cells of a summary: time, tokens and values, as far as they are known."""

from __future__ import annotations

import pytest
from logged_runs import row, write_run

from lit_grpo.runs.report.history import Run, load_runs
from lit_grpo.runs.report.summary import (
    HEADINGS,
    change,
    clock,
    gap_notes,
    num_tokens,
    running_time,
    steps_cell,
    summary_row,
    token_notes,
)

REWARDS = {"reward/mean": [0.5, 0.75]}
LENGTHS = {"completions/mean_length": [2.0, 3.0]}


def run_of(path, metrics, **files) -> Run:
    (run,) = load_runs([write_run(path / "my" / "0", metrics, **files)])
    return run


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.4, "0 s"),
        (59.6, "1 min 0 s"),
        (123, "2 min 3 s"),
        (3600, "1 h 0 min"),
        (90_061, "25 h 1 min"),
    ],
)
def test_a_time_has_its_two_largest_units(seconds, shown):
    assert clock(seconds) == shown


def test_a_row_has_a_cell_for_each_heading(tmp_path):
    run = run_of(tmp_path, REWARDS)
    cells = ("my/0", "2", "3 s", "–", "–", "0.500 → 0.750")
    assert dict(zip(HEADINGS, summary_row(run), strict=True)) == dict(
        zip(HEADINGS, cells, strict=True)
    )
    assert running_time([run, run]) == "6 s"


@pytest.mark.parametrize(
    ("values", "shown"),
    [([0.25, None], "0.250"), ([0.25, 1.0], "0.250 → 1.000"), ([None, None], "–")],
)
def test_a_value_has_an_arrow_if_it_was_measured_twice(values, shown, tmp_path):
    assert change(run_of(tmp_path, {"reward/std": values}), "reward/std") == shown


@pytest.mark.parametrize(
    ("rate", "shown"), [(10.0, "50"), (1000.0, "5.0 k"), (1_000_000.0, "5.0 M")]
)
def test_tokens_are_the_rate_of_each_step_times_its_time(rate, shown, tmp_path):
    metrics = {"perf/tokens_per_second": [rate] * 2, "timing/step_duration_s": [2.0, 3.0]}
    assert num_tokens(run_of(tmp_path, metrics)) == shown


def test_without_rates_tokens_are_counted_in_the_completions(tmp_path):
    files = {0: [row(num_tokens=2), row(num_tokens=3)], 1: [row(num_tokens=4)]}
    run = run_of(tmp_path, REWARDS | LENGTHS, completions=files)
    assert num_tokens(run) == "9"
    assert token_notes([run]) == []


def test_tokens_that_are_not_known_have_a_note_in_a_run_of_grpo_only(tmp_path):
    run = run_of(tmp_path / "grpo", REWARDS | LENGTHS, completions={0: [row()]})
    sft = run_of(tmp_path / "sft", {"sft/loss": [2.0, 1.0]})
    assert num_tokens(run) == num_tokens(sft) == "–"
    (note,) = token_notes([run, sft])
    assert note.startswith("The tokens of my/0 are not known: completions/ does not have the")


def test_steps_that_were_lost_are_left_out_and_named(tmp_path):
    done = {"step": 3, "kind": "done"}
    logging = {"log_every_n_steps": 1, "accumulate_grad_batches": 1}
    run = run_of(tmp_path, REWARDS, events=[done], config={"trainer": logging})
    assert steps_cell(run) == "2 of 3"
    (note,) = gap_notes([run])
    assert note.startswith("my/0: ")
    assert gap_notes([run_of(tmp_path / "whole", REWARDS)]) == []
