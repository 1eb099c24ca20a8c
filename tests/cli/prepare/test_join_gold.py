"""Gold scores come from the votes of the cache; none is invented."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lit_grpo.cli.prepare.join_gold import (
    Checked,
    NoCache,
    check_key,
    gold_of,
    join_gold,
    refuse_unscored,
    vote_key,
)
from lit_grpo.cli.prepare.recipe import Gold, Recipe, RecipeSource
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.types import UserError

RECIPE = Recipe(
    description="",
    sources={"open": RecipeSource(kind="open", data="x")},
    gold=Gold(num_evals=2, highest=10),
)


class Votes(dict):
    """A cache in memory."""

    def votes(self, key):
        return self.get(key, {})

    def checked(self, key):
        return self.get(key)


def row(number=0, **columns):
    return PreparedRow(
        origin="", id=f"open:{number}", source="open", kind="open", text_hash="",
        columns={"prompt": "Why?", "answers": ["a", "b"], **columns},
    )  # fmt: skip


def test_the_score_is_the_mean_of_the_votes_and_the_spread_their_deviation():
    assert gold_of({0: 4, 1: 8, 2: 0}, 2, 10) == (pytest.approx(0.6), pytest.approx(0.2))
    assert gold_of({0: 4, 2: 8}, 2, 10) is None
    assert gold_of({}, 1, 10) is None


def test_a_row_gets_a_score_for_each_of_its_answers():
    cache = Votes({vote_key(row(), "a"): {0: 10, 1: 10}, vote_key(row(), "b"): {0: 0, 1: 5}})
    joined = join_gold(row(), cache, RECIPE)
    assert joined.columns["gold_scores"] == [1.0, 0.25]
    assert joined.columns["gold_spread"] == [0.0, 0.25]
    assert joined.columns["answers"] == ["a", "b"]


@pytest.mark.parametrize("votes", [{}, {0: 3}, {1: 3}])
def test_a_row_with_an_answer_without_all_votes_has_no_scores(votes):
    cache = Votes({vote_key(row(), "a"): {0: 10, 1: 10}, vote_key(row(), "b"): votes})
    assert join_gold(row(), cache, RECIPE) is None


def test_without_a_cache_or_answers_nothing_is_scored_but_what_the_data_have():
    assert join_gold(row(), NoCache(), RECIPE) is None
    assert join_gold(row(answers=[]), NoCache(), RECIPE) is None
    scored = row(gold_scores=[0.5, 1.0])
    assert join_gold(scored, NoCache(), RECIPE) is scored


def test_what_is_asked_decides_about_the_key():
    keys = [
        vote_key(row(), "a"),
        vote_key(row(), "b"),
        vote_key(row(question="How?"), "a"),
        vote_key(row(answer="Because"), "a"),
        vote_key(row(rubric=[{"criterion": "x"}]), "a"),
    ]
    assert len({*keys}) == 5
    assert vote_key(row(question="Why?"), "a") == keys[0]
    assert {len(key) for key in keys} == {32}
    assert len({key[:16] for key in keys}) == 4
    assert keys[0][:16] == keys[1][:16]


def test_answers_that_a_program_has_checked_are_those_of_a_verifiable_row():
    sources = {"sums": RecipeSource(kind="verifiable", data="x")}
    recipe = replace(RECIPE, sources=sources)
    plain = replace(row(answer="2"), source="sums", kind="verifiable")
    checked = Checked(answers=("2", "3"), gold_scores=(1.0, 0.0))
    for verifier, known in (("MathReward", True), ("FormatReward", False)):
        cache = Votes({check_key(plain, verifier): checked})
        joined = join_gold(plain, cache, recipe)
        assert (joined is not None) == known
        if joined:
            assert joined.columns["answers"] == ["2", "3"]
            assert joined.columns["gold_scores"] == [1.0, 0.0]
            assert joined.columns["gold_spread"] == [0.0, 0.0]
    assert join_gold(row(), Votes({check_key(row(), "MathReward"): checked}), RECIPE) is None


def test_rows_without_scores_are_refused_with_their_number_ids_and_the_command_that_scores_them():
    refuse_unscored([], 9, "score", ["open"])
    command = "lit-grpo precompute --preset a"
    with pytest.raises(UserError) as raised:
        refuse_unscored([row(number) for number in range(7)], 9, command, ["open"])
    assert str(raised.value) == (
        "7 of 9 rows have no gold scores: open:0, open:1, open:2, open:3, open:4 and 2 more (open "
        "rows are compared by them). Score them by lit-grpo precompute --preset a; or set "
        "columns.gold_scores of their source to the column that has them; or keep only the others "
        "with --only_cached."
    )


def test_a_source_without_any_scored_row_can_only_be_taken_out():
    with pytest.raises(UserError) as raised:
        refuse_unscored([row(0), row(1)], 9, None, ["verifiable"])
    assert str(raised.value).endswith(
        "column that has them; or take open out of the recipe's sources."
    )


def test_what_no_judge_can_score_is_said():
    with pytest.raises(UserError) as raised:
        refuse_unscored([row(0), row(1, answers=["a"])], 2, None, [])
    assert str(raised.value) == (
        "2 of 2 rows have no gold scores: open:0, open:1 (open rows are compared by them; 1 have "
        "fewer than two answers, which cannot be compared). Set judge in the recipe to score them; "
        "or set columns.gold_scores of their source to the column that has them; or leave those "
        "with one answer out by where: {num_answers: [2, null]}."
    )
