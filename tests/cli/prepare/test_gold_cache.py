"""Votes and checked answers are found again, whichever process has recorded them."""

from __future__ import annotations

import pytest

from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers, JudgeVotes, StoredGold
from lit_grpo.cli.prepare.join_gold import Checked
from lit_grpo.cli.prepare.recipe import Recipe, RecipeSource
from lit_grpo.judge import Judge
from lit_grpo.types import UserError


def recipe(kind="open", model="m") -> Recipe:
    return Recipe(
        description="",
        sources={"one": RecipeSource(kind=kind, data="x")},
        judge=Judge(model=model, temperature=1.0),
    )


def test_votes_are_there_after_a_refresh_whoever_wrote_them(tmp_path):
    one, other = JudgeVotes(tmp_path), JudgeVotes(tmp_path)
    one.add("k", 0, 7, 0.5)
    one.add("k", 1, 9, 0.5)
    assert one.votes("k") == other.votes("k") == {}
    one.refresh()
    other.refresh()
    assert one.votes("k") == other.votes("k") == {0: 7, 1: 9}
    assert dict(other.all_votes()) == {"k": {0: 7, 1: 9}}
    assert (other.num_votes, other.spent_usd) == (2, 1.0)
    one.close()


def test_a_call_without_a_grade_leaves_only_what_it_cost(tmp_path):
    votes = JudgeVotes(tmp_path)
    votes.add("k", 0, None, 0.25)
    votes.close()
    again = JudgeVotes(tmp_path)
    assert (again.votes("k"), again.num_votes, again.spent_usd) == ({}, 0, 0.25)


def test_of_two_votes_of_one_number_the_first_counts_and_both_were_paid(tmp_path):
    votes = JudgeVotes(tmp_path)
    votes.add("k", 0, 3, 0.5)
    votes.add("k", 0, 8, 0.5)
    votes.refresh()
    assert (votes.votes("k"), votes.num_votes, votes.spent_usd) == ({0: 3}, 1, 1.0)
    votes.close()


def test_the_first_check_of_a_row_is_the_one_that_counts(tmp_path):
    first = Checked(answers=("2", "3"), gold_scores=(1.0, 0.0))
    answers = CheckedAnswers(tmp_path)
    answers.add("k", first)
    answers.add("k", Checked(answers=("4", "5"), gold_scores=(0.0, 0.0)))
    answers.close()
    again = CheckedAnswers(tmp_path)
    assert (again.get("k"), again.get("other")) == (first, None)
    assert [*again.all_answers()] == [first]


def test_a_recipe_finds_the_scores_of_its_judge_and_of_programs(tmp_path):
    scorer = Scorer.of(recipe())
    votes = JudgeVotes(scorer.directory(tmp_path))
    votes.add("k", 0, 7, 0.0)
    votes.close()
    checked = CheckedAnswers(tmp_path)
    checked.add("k", Checked(answers=("2",), gold_scores=(1.0,)))
    checked.close()
    gold = StoredGold(tmp_path, recipe())
    assert gold.votes("k") == {0: 7}
    assert gold.checked("k").answers == ("2",)
    about = {"judge": "m", "template": "grade", "fingerprint": scorer.fingerprint}
    assert gold.scored_by == about
    with pytest.raises(UserError, match="got those of another"):
        StoredGold(tmp_path, recipe(model="n"))


def test_a_recipe_without_open_rows_has_no_judge(tmp_path):
    gold = StoredGold(tmp_path, recipe(kind="verifiable"))
    assert (gold.scored_by, gold.votes("k")) == ({}, {})
