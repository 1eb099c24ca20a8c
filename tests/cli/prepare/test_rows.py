"""Columns get their roles, rows their ids; what cannot be used says why."""

from __future__ import annotations

import pytest

from lit_grpo.cli.prepare.recipe import RecipeSource
from lit_grpo.cli.prepare.rows import UnusableRow, to_prepared, with_ids
from lit_grpo.data.rows.prepared import text_hash
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def prepared(columns, answer=None, kind="verifiable", **roles):
    row = Row(source="a.jsonl", number=3, id="a:3", columns=columns)
    return to_prepared(row, answer, "mine", RecipeSource(kind=kind, data="a.jsonl", columns=roles))


def test_one_column_may_have_two_roles_and_the_gold_answer_replaces_it():
    row = prepared(
        {"question": "1+1?", "answer": "1+1=2\n#### 2", "level": 3},
        answer="2",
        prompt="question",
        completion="answer",
    )
    assert row.columns == {
        "prompt": "1+1?",
        "question": "1+1?",
        "answer": "2",
        "completion": "1+1=2\n#### 2",
        "level": 3,
    }
    assert (row.source, row.kind, row.origin, row.id) == (
        "mine",
        "verifiable",
        "a.jsonl, row 3",
        "",
    )
    assert row.text_hash == text_hash("1+1?")


def test_the_first_of_several_worked_answers_is_the_completion():
    row = prepared({"prompt": "1+1?", "completion": ["It is 2.", "2"]}, answer="2")
    assert row.columns["completion"] == "It is 2."


def test_answers_are_found_in_items_and_a_column_called_like_ours_is_renamed():
    completions = [{"response": "a", "score": 1}, {"response": "b", "score": 2}]
    row = prepared(
        {"instruction": "Why?", "source": "web", "completions": completions, "id": 7},
        kind="open",
        question="instruction",
        answers="completions[].response",
        prompt="instruction",
    )
    assert row.columns == {
        "prompt": "Why?",
        "question": "Why?",
        "answers": ["a", "b"],
        "completions": completions,
        "original_source": "web",
    }
    assert (row.id, row.source) == ("7", "mine")


@pytest.mark.parametrize("name", ["prompt", "messages", "question"])
def test_messages_are_found_under_any_name_of_a_prompt(name):
    said = [{"role": "user", "content": "Why?"}]
    row = prepared({name: said})
    assert row.columns["messages"] == said
    assert "prompt" not in row.columns
    assert (row.text, row.text_hash) == ("Why?", text_hash("Why?"))
    assert "question" not in row.columns


@pytest.mark.parametrize("name", ["prompt", "question"])
def test_messages_in_parts_become_text(name):
    said = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    row = prepared({name: said})
    assert row.columns["messages"] == [{"role": "user", "content": "Why?"}]
    assert (row.text, row.text_hash) == ("Why?", text_hash("Why?"))
    assert "question" not in row.columns


@pytest.mark.parametrize("prompt", ["Why?", [{"role": "user", "content": "Why?"}]])
def test_an_open_row_has_a_question_for_templates_of_rubrics(prompt):
    for name in ("prompt", "question"):
        assert prepared({name: prompt}, kind="open").columns["question"] == "Why?"
    row = prepared({"prompt": "Be brief. Why?", "question": "Why?"}, kind="open")
    assert row.columns["question"] == "Why?"


def test_a_prepared_row_is_prepared_again_without_renaming():
    first = with_ids([prepared({"prompt": "Why?", "level": 2}, answer="5")], {})[0]
    again = prepared(first.as_dict() | {"gold_spread": [0.1]}, answer="5")
    assert again.id == first.id
    assert again.columns == {**first.columns, "gold_spread": [0.1]}


@pytest.mark.parametrize(
    ("columns", "roles", "reason"),
    [
        ({"text": "x"}, {}, "no prompt"),
        ({"prompt": " \n"}, {}, "no prompt"),
        ({"prompt": float("nan")}, {}, "no prompt"),
        ({"prompt": []}, {}, "no prompt"),
        ({"prompt": 3}, {}, "prompt is no text"),
        ({"prompt": ["x"]}, {}, "prompt is no text"),
        ({"prompt": [{"role": "user", "content": [IMAGE]}]}, {}, "prompt is no text"),
        ({"prompt": "x", "key": None}, {"id": "key"}, "no id"),
        ({"prompt": "x", "key": " "}, {"id": "key"}, "no id"),
        ({"prompt": "x", "id": [1]}, {}, "unusable id"),
        ({"prompt": "x", "answers": ["a", 1]}, {}, "unusable answers"),
        ({"prompt": "x", "answers": "[1"}, {}, "unusable answers"),
        ({"prompt": "x", "answers": ["a", "b"], "gold_scores": [1]}, {}, "unusable scores"),
        *(
            ({"prompt": "x", "answers": ["a", "b"], "gold_scores": [1, bad]}, {}, "unusable scores")
            for bad in (float("nan"), float("inf"), None, "1")
        ),
    ],
)
def test_a_row_that_cannot_be_used_has_a_reason(columns, roles, reason):
    with pytest.raises(UnusableRow) as raised:
        prepared(columns, **roles)
    assert raised.value.reason == reason


def test_lists_may_be_the_text_of_json():
    row = prepared({"prompt": "x", "answers": '["a", "b"]', "gold_scores": "[0, 1]"})
    assert (row.columns["answers"], row.columns["gold_scores"]) == (["a", "b"], [0.0, 1.0])


def test_ids_are_of_the_prompt_and_do_not_depend_on_the_order():
    rows = [prepared({"prompt": text, "n": n}) for n, text in enumerate("aabca")]
    ids = {row.columns["n"]: row.id for row in with_ids(rows, {})}
    assert ids == {row.columns["n"]: row.id for row in with_ids(rows[::-1], {})}
    assert len(set(ids.values())) == 5
    plain = f"mine:{text_hash('a')[:16]}"
    assert {ids[0], ids[1], ids[4]} == {plain, f"{plain}-2", f"{plain}-3"}


@pytest.mark.parametrize("value", [None, "", " ", float("nan")])
def test_a_row_without_a_value_in_a_column_id_gets_the_id_of_its_prompt(value):
    (row,) = with_ids([prepared({"prompt": "a", "id": value})], {})
    assert row.id == f"mine:{text_hash('a')[:16]}"


@pytest.mark.parametrize(
    ("name", "roles", "fix"),
    [
        (
            "id",
            {},
            r"rename the column id in the file .*, or take .* sources\.mine\.columns: {id: N",
        ),
        ("id", {"id": "id"}, "rename the column id in the file"),
        ("key", {"id": "key"}, r"leave the id out of sources\.mine\.columns"),
    ],
)
def test_ids_that_repeat_are_refused_with_both_rows_and_what_gives_others(name, roles, fix):
    rows = [prepared({"prompt": text, name: "x"}, **roles) for text in "ab"]
    source = RecipeSource(kind="verifiable", data="a.jsonl", columns=roles)
    message = (
        rf"got 1 rows whose id another row has: 'x' is that of a\.j.*Make them unique, or {fix}"
    )
    with pytest.raises(UserError, match=message):
        with_ids(rows, {"mine": source})
