"""Stored answers and gold scores of a row: the forms that are read, and what is refused."""

import json
import math

import numpy as np
import pytest

from lit_grpo.data.rows.scored_answers import read_scored_answers

ANSWERS = ["so so", "good", "bad"]
SCORES = [0.5, 0.9, 0]


def read(answers=ANSWERS, scores=SCORES):
    return read_scored_answers({"answers": answers, "scores": scores}, "answers", "scores")


@pytest.mark.parametrize("write", [list, tuple, np.array, json.dumps])
def test_columns_may_be_lists_arrays_or_json(write):
    stored = read(write(ANSWERS), write(SCORES))
    assert stored.answers == ("so so", "good", "bad")
    assert stored.gold_scores == (0.5, 0.9, 0.0)
    assert (stored.best, stored.worst, stored.has_contrast) == ("good", "bad", True)


def test_answers_of_equal_quality_have_no_contrast():
    assert not read(scores=[0.4, 0.4, 0.4]).has_contrast


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"scores": None}, "scores is null"),
        ({"scores": math.nan}, "scores is null"),
        ({"scores": 0.5}, "scores is not a list but a float"),
        ({"scores": "[0.1, 0.2"}, "scores is text but not JSON"),
        ({"scores": [0.1, 0.2]}, "scores holds 2 values but answers holds 3"),
        ({"scores": [0.1, None, 0.3]}, r"scores\[1\] is None, not a finite number"),
        ({"scores": [0.1, True, 0.3]}, r"scores\[1\] is True, not a finite number"),
        ({"scores": [0.1, "good", 0.3]}, r"scores\[1\] is 'good', not a finite number"),
        ({"scores": np.array([0.1, np.nan, 0.3])}, r"scores\[1\] is nan, not a finite number"),
        ({"scores": "[0.1, NaN, 0.3]"}, r"scores\[1\] is nan, not a finite number"),
        ({"scores": [0.1, 10**400, 0.3]}, r"scores\[1\] is 10*, not a finite number"),
        ({"scores": "[" * 5000}, "scores is text but not JSON .*nested more than 200 deep"),
        ({"answers": None}, "answers is null"),
        ({"answers": ["one", None, "three"]}, r"answers\[1\] is None, not text"),
        ({"answers": ["one"], "scores": [1.0]}, "answers holds 1; a comparison needs at least 2"),
    ],
)
def test_columns_that_cannot_be_compared_are_refused_with_the_reason(columns, reason):
    with pytest.raises(ValueError, match=reason):
        read(**columns)


def test_a_missing_column_is_refused():
    with pytest.raises(ValueError, match="no column scores"):
        read_scored_answers({"answers": ANSWERS}, "answers", "scores")
