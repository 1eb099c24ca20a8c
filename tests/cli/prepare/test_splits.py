"""Holdouts are stable, and every split has the shares of the sources."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from lit_grpo.cli.prepare.recipe import Recipe, RecipeSource
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.cli.prepare.splits import Sizes, in_order, limit, split
from lit_grpo.data.rows.prepared import Holdout, text_hash
from lit_grpo.types import UserError

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


def recipe(weights=None, **settings):
    sources = {
        name: RecipeSource(kind="verifiable", data="x", weight=weight)
        for name, weight in (weights or WEIGHTS).items()
    }
    return Recipe(description="", sources=sources, **settings)


def row(source, number, text=None):
    return PreparedRow(
        origin="", id=f"{source}:{number}", source=source, kind="verifiable",
        text_hash=text or f"{source}{number}", columns={"prompt": str(number)},
    )  # fmt: skip


ROWS = [row(source, number) for source in WEIGHTS for number in range(100)]


def splits(rows=ROWS, holdout=0, validation=0, held_out=None, **settings):
    ordered = in_order(rows, recipe(**settings), held_out)
    found = split(ordered, Sizes(holdout=holdout, validation=validation), held_out)
    assert sum(map(len, found.values())) == len(rows)
    return found


def ids(rows):
    return {one.id for one in rows}


def test_a_smaller_holdout_is_part_of_a_larger_one_whatever_the_order_of_rows():
    before = set()
    for size in range(1, 60):
        found = ids(splits(random.Random(size).sample(ROWS, len(ROWS)), holdout=size)["holdout"])
        assert len(found) == size
        assert before <= found
        before = found


def test_a_holdout_depends_on_the_seed_and_not_on_rows_of_other_sources():
    one = ids(splits(holdout=40)["holdout"])
    assert one != ids(splits(holdout=40, seed=1)["holdout"])
    alone = splits([each for each in ROWS if each.source == "a"], holdout=20)
    assert {each for each in one if each.startswith("a:")} == ids(alone["holdout"])


@pytest.mark.parametrize("size", [10, 40, 77])
def test_every_split_has_the_shares_of_the_sources(size):
    found = splits(holdout=size, validation=20)
    for name, number in (("holdout", size), ("validation", 20)):
        counts = Counter(one.source for one in found[name])
        assert sum(counts.values()) == number
        for source, weight in WEIGHTS.items():
            assert abs(counts[source] - weight * number) <= 1


def test_a_question_and_a_prompt_that_wraps_it_come_into_the_same_split():
    def wrapping(number):
        columns = {"prompt": f"Think: {number}?", "question": f"{number}?"}
        return replace(row("b", number), columns=columns)

    asked = [row("a", number, text_hash(f"{number}?")) for number in range(100)]
    wrapped = [wrapping(number) for number in range(100)]
    found = splits([*asked, *wrapped], holdout=20, weights={"a": 1, "b": 1})
    numbers = [one.id.split(":")[1] for one in found["holdout"]]
    assert len(numbers) == 40
    assert len(set(numbers)) == 20
    file = Holdout(ids=frozenset(), text_hashes=frozenset([text_hash("7?")]), files=())
    again = splits([*asked, *wrapped], held_out=file, weights={"a": 1, "b": 1})
    assert ids(again["holdout"]) == {"a:7", "b:7"}


def test_the_same_question_in_different_prompts_is_no_reason_to_stay_together():
    same = {"question": "Which of these is true?"}
    rows = [replace(one, columns=dict(one.columns) | same) for one in ROWS]
    assert ids(splits(rows, holdout=20)["holdout"]) == ids(splits(holdout=20)["holdout"])


def test_a_fraction_validates_of_what_is_not_held_out():
    assert len(splits(holdout=100, validation=0.1)["validation"]) == 20


def test_rows_with_the_same_prompt_are_in_the_same_split():
    copies = [row("b", 200 + number, f"a{number}") for number in range(100)]
    found = splits([*ROWS, *copies], holdout=50, validation=50)
    texts = {name: {one.text_hash for one in rows} for name, rows in found.items()}
    assert len(texts["holdout"]) == len(texts["validation"]) == 50
    assert not texts["train"] & texts["holdout"] | texts["train"] & texts["validation"]


def test_what_a_file_holds_out_is_held_out_by_id_and_by_text():
    file = Holdout(ids=frozenset(["a:3", "gone"]), text_hashes=frozenset(["b5"]), files=())
    found = splits(held_out=file, validation=10)
    assert ids(found["holdout"]) == {"a:3", "b:5"}
    assert len(found["validation"]) == 10


def test_a_source_without_rows_to_train_on_is_refused():
    rows = [*ROWS, row("d", 0)]
    weights = WEIGHTS | {"d": 1.0}
    with pytest.raises(UserError, match=r"got none of d: of 301 prompts 20 are held out and 0 val"):
        splits(rows, holdout=20, weights=weights)


def test_all_rows_of_sources_of_equal_numbers_and_weights_may_be_trained_on():
    rows = [row(source, number) for source in "ab" for number in range(20)]
    equal = {"a": 1, "b": 1}
    assert len(limit(rows, recipe(equal, size=40))) == 40
    with pytest.raises(UserError, match="size must be at most 40 for these weights, got 41"):
        limit(rows, recipe(equal, size=41))


def test_a_size_keeps_the_shares_and_may_not_be_larger_than_they_allow():
    counts = Counter(one.source for one in limit(ROWS, recipe(size=50)))
    assert counts == {"a": 25, "b": 15, "c": 10}
    with pytest.raises(UserError, match=r"size must be at most (\d+) for these weights") as raised:
        limit(ROWS, recipe(size=290))
    largest = int(str(raised.value).split()[5])
    assert len(limit(ROWS, recipe(size=largest))) == largest
    assert abs(largest - 200) <= 2  # 100 of a are half
    assert "100 of a, 100 of b, 100 of c" in str(raised.value)
    with pytest.raises(UserError):
        limit(ROWS, recipe(size=largest + 1))
    assert len(limit(ROWS, recipe())) == 300
