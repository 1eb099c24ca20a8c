"""Measures of rows, computed by hand."""

from __future__ import annotations

import pytest

from lit_grpo.cli.analyze.measures import Lengths, measure
from lit_grpo.cli.analyze.scored_rows import ScoredRow, ScoredRows


def rows(*found):
    return ScoredRows(kind="prepared", rows=found)


def row(*scores, source="open", **settings):
    return ScoredRow(source=source, scores=scores or None, **settings)


def test_signal_is_the_share_of_the_compared_rows_whose_scores_differ_enough():
    found = rows(
        row(0.2, 0.3),
        row(0.5, 0.59),
        row(1.0, 1.0),
        row(0.0, 0.3, 0.8),
        row(),  # counts, since its scores are missing
        row(is_compared=False),  # does not
    )
    assert measure(found, 0.1)["all"].signal_useful_pct == 40.0
    assert measure(found, 0.05)["all"].signal_useful_pct == 60.0
    assert measure(found, 0.0)["all"].signal_useful_pct == 60.0
    assert measure(rows(row(0.3, 0.1 + 0.2)), 0.0)["all"].signal_useful_pct == 0.0
    assert measure(found, 0.81)["all"].signal_useful_pct == 0.0
    one = measure(found, 0.1)["all"]
    assert (one.num_rows, one.num_compared, one.num_null) == (6, 5, 1)
    assert measure(rows(row(is_compared=False)), 0.1)["all"].signal_useful_pct is None


def test_spreads_are_counted_in_twenty_bins_up_to_the_largest():
    one = measure(rows(row(0.0, 0.0), row(0.0, 0.07), row(0.0, 1.0), row(0.2, 0.2)), 0.1)["all"]
    assert one.spread_max == 1.0
    assert one.spread_histogram == (2, 1, *[0] * 17, 1)
    one = measure(rows(row(-1.0, 3.0), row(0.0, 1.1)), 0.1)["all"]
    assert one.spread_max == 4.0
    assert one.spread_histogram == (*[0] * 5, 1, *[0] * 13, 1)


def test_votes_agree_by_the_share_of_the_most_common_one():
    votes = ((7, 7, 7), (1, 2, 3), (5,))
    one = measure(rows(row(0.7, 0.2, votes=votes, deviations=(0.1, 0.3))), 0.1)["all"]
    assert one.vote_agreement == pytest.approx((1 + 1 / 3) / 2, abs=1e-4)
    assert one.vote_deviation == 0.2
    assert measure(rows(row(0.7, 0.2)), 0.1)["all"].vote_agreement is None


def test_lengths_are_percentiles():
    found = rows(*(row(0, 1, prompt_length=n, answer_lengths=(n, 2 * n)) for n in range(101)))
    one = measure(found, 0.1)["all"]
    assert one.prompt_lengths == Lengths(p5=5.0, p50=50.0, p95=95.0, max=100.0)
    assert one.answer_lengths.max == 200.0
    assert measure(rows(row(0, 1)), 0.1)["all"].prompt_lengths is None


def test_each_source_is_measured_with_its_share_duplicates_and_nulls():
    found = rows(
        row(0, 1, source="open", text_hash="a", nulls=("rubric", "answer")),
        row(0, 1, source="open", text_hash="a", nulls=("answer",)),
        row(0, 1, source="open", text_hash="b", nulls=("answer",)),
        row(source="sums", text_hash="b", nulls=("rubric",), is_compared=False),
    )
    measured = measure(found, 0.1)
    assert list(measured) == ["all", "open", "sums"]
    assert [one.num_duplicates for one in measured.values()] == [2, 1, 0]
    assert [one.share for one in measured.values()] == [1.0, 0.75, 0.25]
    assert [one.nulls for one in measured.values()] == [{"rubric": 1}, {"rubric": 1}, {}]
    assert [one.signal_useful_pct for one in measured.values()] == [100.0, 100.0, None]
    assert list(measure(rows(row(0, 1)), 0.1)) == ["all"]
