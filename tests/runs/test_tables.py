from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from lit_grpo.runs.tables import (
    WIDTH_OF_FILES,
    TextTail,
    duration,
    one_line,
    open_console,
    with_unit,
)


@pytest.mark.parametrize(
    ("text", "columns", "cell"),
    [
        ("the answer is 42", 16, "the answer is 42"),
        ("the answer is 42", 12, "…nswer is 42"),
        ("two\nlines", 20, "two lines"),
        ("答えは四十二", 8, "…四十二"),
        ("[bold]", 20, "[bold]"),
    ],
)
def test_a_cell_shows_the_end_of_its_text(text, columns, cell, capsys):
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row(TextTail(text))
    Console(width=columns).print(table)
    assert capsys.readouterr().out.rstrip() == cell


@pytest.mark.parametrize(
    ("number", "shown"),
    [(608_256, "608 k"), (1_543_714_304, "1.54 B"), (96_000_000, "96 M"), (12, "12")],
)
def test_a_number_has_the_unit_of_its_size(number, shown):
    assert with_unit(number) == shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.42, "0.42 s"),
        (2.5, "2.5 s"),
        (89, "89 s"),
        (600, "10 min"),
        (7200, "2.0 h"),
        (2.5 * 86400, "2.5 days"),
    ],
)
def test_times_are_short(seconds, words):
    assert duration(seconds) == words


def test_what_cannot_be_printed_is_a_dot():
    assert one_line("a\x1b[2J\x00b") == "a·[2J·b"


def test_output_that_goes_to_no_terminal_is_wide_unless_columns_are_given(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == WIDTH_OF_FILES
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70


def test_output_that_goes_to_no_terminal_has_no_spaces_at_the_ends_of_lines(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table.grid(padding=(0, 2))
    table.add_row("ok", "long enough")
    table.add_row("failed", "no")
    open_console().print(table)
    assert capsys.readouterr().out == "ok      long enough\nfailed  no\n"
