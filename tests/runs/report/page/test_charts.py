from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from logged_runs import write_run

from lit_grpo.runs.report.history import load_runs
from lit_grpo.runs.report.page.charts import MAX_POINTS, draw_charts, draw_clock, thin


def draw(*runs, is_comparison=False):
    charts = draw_charts(load_runs(runs), is_comparison=is_comparison)
    return {chart["title"]: chart for chart in charts}


def lines(chart):
    return {trace["name"]: (trace["x"], trace["y"]) for trace in chart["traces"]}


def test_only_what_was_logged_has_a_chart(tmp_path):
    sft = write_run(tmp_path / "sft", {"sft/loss": [2.0, 1.0], "policy/kl": [0.0, 0.0]})
    assert list(draw(sft)) == ["SFT loss"]
    assert lines(draw(sft)["SFT loss"]) == {"": ([1, 2], [2.0, 1.0])}


def test_steps_without_a_value_are_left_out_and_what_is_not_finite_is_a_gap(tmp_path):
    run = write_run(tmp_path / "run", {"policy/loss": [0.5, None, np.inf]})
    assert lines(draw(run)["Policy loss"]) == {"": ([1, 3], [0.5, None])}


def test_the_reward_has_a_band_of_its_deviation(tmp_path):
    run = write_run(tmp_path / "run", {"reward/mean": [0.5, 0.75], "reward/std": [0.25, 0.5]})
    low, high, mean = draw(run)["Reward"]["traces"]
    assert (low["y"], high["y"], mean["y"]) == ([0.25, 0.25], [0.75, 1.25], [0.5, 0.75])
    assert (low["showlegend"], high["showlegend"], mean["showlegend"]) == (False, False, True)
    assert high["fill"] == "tonexty"


def test_a_reward_without_a_deviation_and_lengths_without_extremes_are_drawn(tmp_path):
    run = write_run(tmp_path / "run", {"reward/mean": [0.5], "completions/mean_length": [3.0]})
    assert list(draw(run)) == ["Reward", "Completion length"]


def test_phases_are_stacked_up_to_the_whole_step(tmp_path):
    metrics = {
        "timing/step_duration_s": [4.0, 4.0],
        "timing/generation_duration_s": [1.0, 2.0],
        "timing/update_duration_s": [2.0, 1.0],
        "timing/logprob_duration_s": [0.001, 0.0],
    }
    drawn = draw(write_run(tmp_path / "run", metrics))["Time per step"]
    assert {name: y for name, (_, y) in lines(drawn).items()} == {
        "generation": [1.0, 2.0],
        "update": [2.0, 1.0],
        "other": [1.0, 1.0],
    }


def test_several_rewards_are_drawn_together_or_compared_one_by_one(tmp_path):
    metrics = {"reward/mean": [1.0], "reward/math/mean": [0.5], "reward/format/mean": [0.25]}
    runs = [write_run(tmp_path / name, metrics) for name in "ab"]
    assert set(lines(draw(runs[0])["Individual rewards, unweighted"])) == {"math", "format"}
    compared = draw(*runs, is_comparison=True)
    assert {"Reward math", "Reward format"} <= set(compared)
    assert [trace["meta"] for trace in compared["Reward math"]["traces"]] == [0, 1]


def test_sources_are_drawn_together_or_compared_one_by_one_and_are_no_rewards(tmp_path):
    metrics = {
        "reward/mean": [1.0, 1.0],
        "reward/math/mean": [0.5, 0.5],
        "data/open/share": [0.25, 0.75],
        "data/sums/share": [0.75, 0.25],
        "reward/open/mean": [0.1, 0.2],
        "reward/sums/mean": [0.3, 0.4],
        "val/sums/accuracy": [None, 0.5],
    }
    runs = [write_run(tmp_path / name, metrics) for name in "ab"]
    drawn = draw(runs[0])
    assert "Individual rewards, unweighted" not in drawn
    assert lines(drawn["Reward by source"]) == {
        "open": ([1, 2], [0.1, 0.2]),
        "sums": ([1, 2], [0.3, 0.4]),
    }
    assert set(lines(drawn["Prompts by source"])) == {"open", "sums"}
    compared = draw(*runs, is_comparison=True)
    assert {"Reward of open", "Reward of sums"} < set(compared)
    assert "Reward math" not in compared


def test_compared_runs_have_colours_of_their_own_and_only_the_main_line(tmp_path):
    metrics = {"val/accuracy": [0.1, 0.2], "val/avg@4": [0.1, 0.1]}
    runs = [write_run(tmp_path / name, metrics) for name in "abcdefghij"]
    traces = draw(*runs, is_comparison=True)["Held-out accuracy"]["traces"]
    looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in traces}
    assert len(traces) == len(looks) == 10


def test_stages_are_drawn_behind_each_other_where_both_have_the_metric(tmp_path):
    sft = write_run(tmp_path / "sft", {"val/accuracy": [0.1, 0.2], "sft/loss": [2.0, 1.0]})
    config = {"model": {"policy": {"path": str(sft / "final")}}}
    metrics = {"val/accuracy": [0.2, 0.9], "reward/mean": [0.5, 0.6]}
    grpo = write_run(tmp_path / "grpo", metrics, config=config)
    charts = draw(sft, grpo)
    assert charts["Held-out accuracy"]["offsets"] == {0: 0, 1: 2}
    assert [trace["x"] for trace in charts["Held-out accuracy"]["traces"]] == [[1, 2], [3, 4]]
    assert charts["Held-out accuracy"]["secondsBefore"] == {0: 0, 1: 3.0}
    assert charts["Reward"]["offsets"] == charts["Reward"]["secondsBefore"] == {1: 0}


def test_names_cannot_be_read_as_html(tmp_path):
    metrics = {"reward/<a href=x>/mean": [1.0], "reward/b/mean": [1.0]}
    drawn = draw(write_run(tmp_path / "run", metrics))["Individual rewards, unweighted"]
    assert "&lt;a href=x&gt;" in lines(drawn)


@pytest.mark.parametrize("num_values", [1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS + 3])
def test_a_long_curve_becomes_means_that_end_at_its_last_step(num_values):
    values = pd.Series(np.arange(num_values, dtype=float), index=range(1, num_values + 1))
    drawn = thin(values)
    assert len(drawn) <= MAX_POINTS
    assert drawn.index[-1] == num_values
    size = -(-num_values // MAX_POINTS)
    assert drawn.iloc[0] == np.arange(min(size, num_values)).mean()


def test_the_clock_begins_at_0_and_ends_with_the_last_step(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "run", {"reward/mean": [0.5] * 3})])
    assert draw_clock(run) == {"steps": [0, 1, 2, 3], "seconds": [0.0, 1.5, 3.0, 4.5]}
    (long,) = load_runs([write_run(tmp_path / "long", {"reward/mean": [0.5] * 2500})])
    clock = draw_clock(long)
    assert (clock["steps"][:3], clock["steps"][-2:]) == ([0, 1, 4], [2497, 2500])
    assert clock["seconds"] == [1.5 * step for step in clock["steps"]]
    assert len(clock["steps"]) <= MAX_POINTS + 1


def test_a_run_that_has_not_finished_a_step_has_a_clock_at_0(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.log").touch()
    (run,) = load_runs([path])
    assert draw_clock(run) == {"steps": [0], "seconds": [0.0]}
