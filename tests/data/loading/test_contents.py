"""Rows that have changed are described in another way, whatever of them has changed."""

from dataclasses import replace

import pytest
from tiny import prompt

from lit_grpo.data.loading.contents import describe_rows

ROWS = [prompt(id="1"), prompt(id="2")]


def test_the_same_rows_have_the_same_description_in_every_process():
    rows = [replace(one, text="x", answer=None, columns={"b": 1, "a": ["é"]}) for one in ROWS]
    assert describe_rows(rows) == "2 (checksum 59dd02ff)"


@pytest.mark.parametrize(
    "change", [{"text": "other"}, {"answer": "other"}, {"id": "3"}, {"columns": {"keyword": "x"}}]
)
def test_any_change_shows(change):
    assert describe_rows([ROWS[0], replace(ROWS[1], **change)]) != describe_rows(ROWS)


def test_objects_of_a_program_are_the_same_in_every_process():
    one, other = ([replace(ROWS[0], columns={"x": object()})] for _ in range(2))
    assert describe_rows(one) == describe_rows(other)


def test_the_order_counts():
    assert describe_rows(ROWS[::-1]) != describe_rows(ROWS)
