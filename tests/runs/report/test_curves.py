"""Phases and sources of a mixture in the curves."""

from logged_runs import write_run
from matplotlib.figure import Figure

from lit_grpo.runs.report.curves import PANELS, Panel, draw_curves, draw_panel, phase_starts
from lit_grpo.runs.report.history import load_runs


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


def test_the_rewards_of_several_sources_have_a_panel(tmp_path):
    (panel,) = (one for one in PANELS if one.title == "Reward by source")
    metrics = {"reward/mean": [0.5, 0.5], "data/a/share": [1.0, 1.0], "reward/a/mean": [0.1, 0.2]}
    others = {"data/b/share": [0.0, 0.0], "reward/b/mean": [0.3, 0.4]}
    one, two = load_runs(
        [write_run(tmp_path / "one", metrics), write_run(tmp_path / "two", metrics | others)]
    )
    assert not panel.fits(one)
    assert panel.fits(two)
    ax = Figure().subplots()
    draw_panel(ax, panel, [two])
    assert [[*line.get_ydata()] for line in ax.lines] == [[0.1, 0.2], [0.3, 0.4]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]


def test_a_run_with_one_phase_or_none_has_no_line(tmp_path):
    assert lines(load(tmp_path / "one", [1] * 6)) == []
    assert lines(load(tmp_path / "none", None)) == []


def test_a_name_with_an_emoji_is_drawn_without_a_warning(tmp_path, recwarn):
    run = load(tmp_path / "run 🚀", None)
    draw_curves([run], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()
    assert [str(one.message) for one in recwarn if "Glyph" in str(one.message)] == []
