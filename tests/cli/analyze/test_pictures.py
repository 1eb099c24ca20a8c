"""The picture of ``lit-grpo analyze``, from rows whose values are known."""

from __future__ import annotations

import pytest
from prepared_data import write_prepared

from lit_grpo.__main__ import main
from lit_grpo.cli.analyze.pictures import draw_rows
from lit_grpo.cli.analyze.scored_rows import ScoredRow, ScoredRows

ROWS = [
    ScoredRow(source="sums", scores=(0.0, 1.0), pass_rate=0.5, prompt_length=4.0),
    ScoredRow(source="sums", scores=None, pass_rate=0.0, prompt_length=8.0),
    ScoredRow(source="essays", scores=(0.3, 0.4), prompt_length=40.0),
]


def heights(ax) -> list[list[int]]:
    """The heights of the bars that are not empty, by source."""
    return [[int(bar.get_height()) for bar in one if bar.get_height()] for one in ax.containers]


def test_each_measure_is_a_histogram_by_source(here):
    found = ScoredRows(kind="prepared", rows=ROWS, shares={"sums": 0.5, "essays": 0.5})
    figure = draw_rows(found, 0.1, "tokens", here / "rows.png")
    spreads, rates, lengths, balance = figure.axes
    assert (here / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert heights(spreads) == [[1], [1]]  # essays, sums
    assert spreads.lines[0].get_xdata()[0] == 0.1
    assert heights(rates) == [[], [1, 1]]
    assert lengths.get_title(loc="left") == "Lengths of prompts (tokens)"
    assert lengths.get_xlim()[1] >= 40
    assert [text.get_text() for text in spreads.get_legend().texts] == ["essays", "sums"]
    assert [bar.get_width() for bar in balance.containers[0]] == [1, 2]
    assert [line.get_xdata()[0] for line in balance.lines] == [1.5, 1.5]


def test_what_is_not_known_has_no_panel(here):
    rows = [ScoredRow(source="", scores=(0.0, 0.0))]
    figure = draw_rows(ScoredRows(kind="run", rows=rows), 0.0, "tokens", here / "rows.svg")
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["Best score minus worst, of rows", "Rows by source"]
    assert figure.axes[0].get_legend() is None
    assert not figure.axes[0].lines
    assert "<svg" in (here / "rows.svg").read_text()


def test_the_command_writes_the_picture_beside_its_table(here, capsys):
    write_prepared(here / "data")
    assert main(["analyze", "data", "--picture", "rows.png"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "picture: rows.png"
    assert (here / "rows.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rows.txt", "error: --picture must be a name that ends in .png or .svg, got rows.txt"),
        ("no/rows.png", "error: picture must be in a directory that exists"),
    ],
)
def test_a_picture_that_cannot_be_written_is_one_line(path, message, here, capsys):
    write_prepared(here / "data")
    assert main(["analyze", "data", "--picture", path]) == 2
    assert capsys.readouterr().err.startswith(message)
