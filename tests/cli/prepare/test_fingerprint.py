"""Which scores are comparable: those of one judge, with one template and one scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_grpo.cli.prepare.fingerprint import Scorer, read_scale
from lit_grpo.cli.prepare.gold_cache import JudgeVotes
from lit_grpo.cli.prepare.recipe import Gold, Recipe, RecipeSource
from lit_grpo.judge import Judge
from lit_grpo.types import UserError

JUDGE = {"model": "m", "temperature": 1.0}


def recipe(gold=None, **judge) -> Recipe:
    return Recipe(
        description="",
        sources={"open": RecipeSource(kind="open", data="x")},
        judge=Judge(**JUDGE | judge),
        gold=Gold(**gold or {}),
    )


def scorer(gold=None, **judge) -> Scorer:
    return Scorer.of(recipe(gold, **judge))


def vote(of: Scorer, cache: Path, grade: int | None) -> Path:
    """Record a call in the directory of a judge."""
    directory = of.directory(cache)
    of.write(directory)
    votes = JudgeVotes(directory)
    votes.add("k", 0, grade, 0.1)
    votes.close()
    return directory


@pytest.mark.parametrize(
    ("gold", "judge"),
    [
        ({}, {"base_url": "http://127.0.0.1:1/v1", "auth": "none"}),
        ({"num_evals": 5}, {}),
        ({"cache": "elsewhere"}, {"max_completion_tokens": 99}),
    ],
)
def test_where_a_judge_is_and_how_often_it_is_asked_do_not_matter(gold, judge):
    assert scorer(gold, **judge).fingerprint == scorer().fingerprint


@pytest.mark.parametrize(
    ("gold", "judge"),
    [
        ({"highest": 5}, {}),
        ({"answers_per_call": 2}, {}),
        ({"show_reference": False}, {}),
        ({"template": "mine.jinja"}, {}),
        ({}, {"model": "n"}),
        ({}, {"temperature": 0.5}),
        ({}, {"extra_body": {"reasoning_effort": "low"}}),
    ],
)
def test_what_a_grade_depends_on_makes_another_judge(gold, judge):
    Path("mine.jinja").write_text(scorer().template.text + "\n")
    other = scorer(gold, **judge).fingerprint
    assert len(other) == 16
    assert other != scorer().fingerprint


def test_a_cache_with_votes_of_another_judge_only_is_refused_with_what_differs(here):
    theirs = vote(scorer(model="n"), here, 7)
    said = rf"got those of another: {theirs.name} \(model n, not m\) \(scores of two judges"
    with pytest.raises(UserError, match=said):
        scorer().directory(here)
    (theirs / "fingerprint.json").unlink()
    with pytest.raises(UserError, match=rf"got those of another: {theirs.name} \(scores of two"):
        scorer().directory(here)


def test_a_call_that_failed_does_not_claim_a_cache(here):
    vote(scorer(model="n"), here, None)
    assert vote(scorer(), here, 7) == here / f"judge-{scorer().fingerprint}"
    with pytest.raises(UserError, match="got those of another"):
        scorer(model="n").directory(here)


def test_the_scale_of_a_judge_is_read_from_its_directory(here):
    directory = vote(scorer({"highest": 5}), here, 3)
    assert read_scale(directory) == 5
    for text in ("{}", "no JSON", "[]"):
        (directory / "fingerprint.json").write_text(text)
        with pytest.raises(UserError, match=r"fingerprint\.json cannot be read: .* writes it"):
            read_scale(directory)


def test_open_rows_need_a_judge_whose_votes_can_differ():
    none = Recipe(description="", sources={"open": RecipeSource(kind="open", data="x")})
    with pytest.raises(UserError, match="need a judge, and the recipe has none"):
        Scorer.of(none)
    with pytest.raises(UserError, match=r"gold\.num_evals must be 1 with a temperature of"):
        scorer(temperature=0.0)
