"""Which rows a filter keeps, and how nested columns are named."""

from __future__ import annotations

import pytest

from lit_grpo.data.rows.filters import MISSING, absent_column, failed_filter, find_value

ROW = {
    "prompt": "12345",
    "answer": "42",
    "answers": ["a", "b", "c"],
    "gold_scores": [0.25, 1.0, 0.5],
    "completions": [{"response": "a", "by": {"model": "m"}}, {"response": "b", "by": None}],
    "meta": {"language": "de", "checked": True},
    "none": None,
    "flag": "True",
    "a.b": "dotted",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("answer", "42"),
        ("meta.language", "de"),
        ("completions[].response", ["a", "b"]),
        ("completions[].by.model", MISSING),
        ("a.b", "dotted"),
        ("meta.other", MISSING),
        ("other", MISSING),
        ("answer[].x", MISSING),
        ("none[].x", None),
    ],
)
def test_a_value_is_found_by_its_name(name, value):
    assert find_value(ROW, name) == value


@pytest.mark.parametrize(
    ("name", "allowed", "is_kept"),
    [
        ("prompt_characters", [5, 5], True),
        ("prompt_characters", [6, None], False),
        ("prompt_characters", [None, 4], False),
        ("answer_characters", [2, 2], True),
        ("num_answers", [2, None], True),
        ("num_answers", [4, None], False),
        ("gold_range", [0.75, 1], True),
        ("gold_range", [0.8, 1], False),
        ("meta.language", "de", True),
        ("meta.language", ["en", "fr", "de"], True),
        ("meta.language", ["en", "fr"], False),
        ("meta.checked", True, True),
        ("none", [None, 5], False),
        ("missing", [0, None], False),
        ("pass_rate", [0.1, 0.9], False),
        ("answer", [0, 100], True),
        ("answer", [43, 100], False),
        ("answer", 42, True),
        ("answer", "42", True),
        ("answer", "42.0", False),
        ("meta.language", [0, 100], False),
        ("flag", True, True),
        ("flag", False, False),
    ],
)
def test_a_row_is_kept_or_the_filter_named(name, allowed, is_kept):
    assert failed_filter(ROW, {name: allowed}) == (None if is_kept else name)


def test_the_first_filter_that_fails_is_named_and_messages_count_by_their_text():
    said = [{"role": "user", "content": "1234"}, {"role": "assistant", "content": None}]
    row = {"messages": said, "prompt": None}
    where = {"prompt_characters": [4, 4], "num_answers": [1, None], "gold_range": [0, 1]}
    assert failed_filter(row, where) == "num_answers"


def test_a_filter_whose_column_no_row_has_is_named_with_the_columns_that_there_are():
    rows = [{"prompt": "a"}, {"prompt": "b", "level": {"of": 1}}]
    where = {"num_answers": 1, "level.of": 2, "levle": 1}
    assert absent_column(where, rows) == (
        "no row has the column 'levle'; they have prompt, level. Did you mean level?"
    )
    assert absent_column({"level.of": 2, "gold_range": 3}, rows) is None


def test_the_characters_of_an_answer_that_is_a_number_are_counted():
    assert failed_filter({"answer": 122}, {"answer_characters": [3, 3]}) is None
