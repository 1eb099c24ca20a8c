"""Marks of the phases of a curriculum in the curves."""

from logged_runs import write_run
from matplotlib.figure import Figure

from lit_grpo.runs.curves import Panel, draw_panel, phase_starts
from lit_grpo.runs.history import load_runs


def load(path, phases):
    metrics = {"reward/mean": [0.1 * n for n in range(6)]}
    if phases:
        metrics["curriculum/phase"] = phases
    (run,) = load_runs([write_run(path, metrics)])
    return run


def lines(run) -> list[float]:
    ax = Figure().subplots()
    draw_panel(ax, Panel(title="Reward", metric="reward/mean"), [run])
    return [line.get_xdata()[0] for line in ax.lines[1:]]


def test_a_line_stands_before_the_first_step_of_each_further_phase(tmp_path):
    run = load(tmp_path / "run", [1, 1, 2, 2, 2, 3])
    assert phase_starts(run) == [3, 6]
    assert lines(run) == [2.5, 5.5]


def test_a_run_with_one_phase_or_none_has_no_line(tmp_path):
    assert lines(load(tmp_path / "one", [1] * 6)) == []
    assert lines(load(tmp_path / "none", None)) == []
