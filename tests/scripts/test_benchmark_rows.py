"""The benchmark of very many rows, with fewer."""

from __future__ import annotations

from _benchmark import rows
from _benchmark.rows import compare_rows

from lit_grpo.data.prompt_data import MAX_ROWS_IN_MEMORY


def test_rows_are_opened_twice_in_processes_of_their_own(monkeypatch):
    monkeypatch.setattr(rows, "TOKENS", 8)
    found = [*compare_rows(MAX_ROWS_IN_MEMORY + 1)]
    assert [(one.unit, "for the first time" in one.case) for one in found] == [
        *(("s", True), ("MB", True), ("s", False), ("MB", False))
    ]
    assert all(one.ours > 0 for one in found if one.unit == "s")
    assert all("50,001 rows opened " in one.case for one in found)
