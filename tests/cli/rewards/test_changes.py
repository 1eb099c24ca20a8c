from __future__ import annotations

import re

import pytest
from rich.console import Console

from lit_grpo.cli.rewards.changes import (
    Comparison,
    best_completion_changed,
    changed_most,
    correlations,
    num_changed,
    num_scored,
    print_changes,
)


def row(reward: float | None, outcome: str = "ok") -> dict:
    return {"reward": reward, "score/a": reward, "outcome/a": outcome}


def comparison(before: list[float | None], after: list[float | None], size: int) -> Comparison:
    return Comparison(
        before=[row(value) for value in before],
        after=[row(value) for value in after],
        group_sizes=[size] * (len(before) // size),
    )


def test_ranks_are_compared_in_groups_where_both_scorings_vary():
    # Ranks 1 2 3 and 1 3 2: Spearman is 1 - 6 * (0 + 1 + 1) / (3 * 8) = 0.5.
    found = comparison([1.0, 2.0, 3.0, 5.0, 5.0, 5.0], [1.0, 3.0, 2.0, 1.0, 2.0, 3.0], 3)
    assert correlations(found) == pytest.approx([0.5])
    assert best_completion_changed(found) == [True, False]


def test_a_best_completion_that_stays_among_the_best_has_not_changed():
    found = comparison([1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], 2)
    assert best_completion_changed(found) == [False, True]


def test_rows_without_a_reward_have_no_rank_but_count_as_changed():
    found = comparison([1.0, None, 0.0, 1.0], [2.0, 1.0, None, 1.0], 2)
    assert correlations(found) == best_completion_changed(found) == []
    assert num_changed(found) == 3
    assert [(old["reward"], new["reward"]) for old, new in changed_most(found)] == [(1.0, 2.0)]


def test_the_rows_that_changed_most_come_first():
    found = comparison([0.0, 0.0, 0.0], [0.5, -2.0, 1.0], 3)
    assert [new["reward"] for _, new in changed_most(found)] == [-2.0, 1.0, 0.5]


def test_another_outcome_counts_as_a_change_without_another_value():
    found = Comparison(before=[row(None, "error")], after=[row(None, "abstain")], group_sizes=[1])
    assert num_changed(found) == num_scored(found) == 1


def test_rows_that_could_not_be_scored_are_not_counted_as_changed():
    before = [row(1.0), row(1.0), row(None, "error"), row(0.0)]
    after = [row(None, "budget_spent"), row(0.5), row(None, "timeout"), row(0.0)]
    found = Comparison(before=before, after=after, group_sizes=[4])
    assert (num_scored(found), num_changed(found)) == (2, 1)


def test_rows_of_a_reward_of_another_name_changed_if_their_sum_did(capsys):
    def rows(name, *values):
        return [{"reward": one, f"score/{name}": one, f"outcome/{name}": "ok"} for one in values]

    shown = {"prompt_id": "p", "completion": "c", "step": 0}
    before, after = rows("math", 1.0, 0.0, 1.0), rows("format", 1.0, 1.0, 1.0)
    found = Comparison(
        before=[shown | one for one in before],
        after=[shown | one for one in after],
        group_sizes=[3],
    )
    assert num_changed(found) == 1
    same = Comparison(
        before=[shown | one for one in before],
        after=[shown | one for one in rows("exact", 1.0, 0.0, 1.0)],
        group_sizes=[3],
    )
    print_changes(Console(width=200), same)
    assert "The weighted sum of all 3 completions is the same as before." in capsys.readouterr().out


def test_means_are_over_the_rows_with_both_values(capsys):
    def rows(*values):
        outcomes = ["ok" if value is not None else "budget_spent" for value in values]
        return [
            {"reward": value, "score/judge": value, "outcome/judge": outcome}
            | {"prompt_id": "p", "completion": "c", "step": 0}
            for value, outcome in zip(values, outcomes, strict=True)
        ]

    found = Comparison(before=rows(0.0, 1.0, 0.2), after=rows(0.5, None, 0.3), group_sizes=[3])
    print_changes(Console(width=120), found)
    shown = capsys.readouterr().out
    assert re.search(r"judge +0\.100 +0\.400", shown)
    assert (
        "The means of judge are over the 2 rows with a value before and after; 1 have only" in shown
    )


def test_the_weighted_sum_names_the_rows_that_it_is_over_when_a_reward_that_failed_is_dropped(
    capsys,
):
    shown = {"prompt_id": "p", "completion": "c", "step": 0, "outcome/math": "ok"}
    before = [
        shown | {"score/math": 1.0, "score/judge": 1.0, "outcome/judge": "ok", "reward": 2.0},
        shown | {"score/math": 0.0, "score/judge": 1.0, "outcome/judge": "ok", "reward": 1.0},
        shown | {"score/math": 1.0, "score/judge": None, "outcome/judge": "error", "reward": None},
    ]
    after = [
        shown | {"score/math": old["score/math"], "reward": old["score/math"]} for old in before
    ]
    print_changes(Console(width=120), Comparison(before=before, after=after, group_sizes=[3]))
    text = capsys.readouterr().out
    assert re.search(r"math +0\.667 +0\.667", text)
    assert re.search(r"weighted sum +1\.500 +0\.500", text)
    assert "The means of the weighted sum are over the 2 rows with a value before and after" in text
