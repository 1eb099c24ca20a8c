"""The benchmark of very many rows, with fewer."""

from __future__ import annotations

from functools import partial

import pytest
from _benchmark import rows
from _benchmark.rows import compare_rows, measure, open_and_train, write_rows
from forked import run_in_processes

from lit_grpo.data.prompt_data import MAX_ROWS_IN_MEMORY


@pytest.mark.slow
def test_rows_are_opened_twice_in_processes_of_their_own(monkeypatch):
    def measure_forked(prepared):
        (measured,) = run_in_processes(partial(open_and_train, str(prepared)))
        return measured

    monkeypatch.setattr(rows, "TOKENS", 8)
    monkeypatch.setattr(rows, "measure", measure_forked)
    found = [*compare_rows(MAX_ROWS_IN_MEMORY + 1)]
    assert [(one.unit, "for the first time" in one.case) for one in found] == [
        *(("s", True), ("MB", True), ("s", False), ("MB", False))
    ]
    assert all(one.ours > 0 for one in found if one.unit == "s")
    assert all("50,001 rows opened " in one.case for one in found)


@pytest.mark.slow
def test_an_interpreter_that_opens_rows_tells_what_it_measured(tmp_path):
    write_rows(tmp_path / "prepared", 640)
    assert measure(tmp_path / "prepared").keys() == {"seconds", "milliseconds", "megabytes"}
