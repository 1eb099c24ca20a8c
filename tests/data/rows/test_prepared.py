"""Prepared data: splits with their types, and rows that must not be trained on."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from prepared_data import open_row, verifiable_row, write_json, write_prepared, write_rows

from lit_grpo.data.rows.prepared import (
    Holdout,
    find_prepared,
    holdout_keys,
    normalised_text,
    prompts_hash,
    text_hash,
)
from lit_grpo.types import Prompt, UserError


@pytest.fixture
def prepared(tmp_path):
    return write_prepared(tmp_path / "prepared", num_train=3, num_validation=1, num_holdout=2)


def test_a_directory_and_a_file_of_its_splits_are_found_and_nothing_else_is(prepared, tmp_path):
    assert find_prepared(str(prepared)).path == prepared
    assert find_prepared(str(prepared / "train.parquet")).path == prepared
    write_rows([open_row(1)], prepared / "other.parquet")
    others = (prepared / "other.parquet", prepared / "none.parquet", prepared / "manifest.json")
    for other in (*others, tmp_path, tmp_path / "none", "org/name:train"):
        assert find_prepared(str(other)) is None


def test_the_rows_of_a_split_come_out_as_they_went_in(prepared):
    split = find_prepared(str(prepared)).split("train")
    assert (split.num_rows, split.sources) == (6, ("open", "verifiable"))
    rows = split.rows()
    expected = [make(number) for number in range(3) for make in (verifiable_row, open_row)]
    assert [row.id for row in rows] == [row["id"] for row in expected]
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, values in zip(rows, expected, strict=True):
        present = {name: value for name, value in row.columns.items() if value is not None}
        assert present == values
        assert row.source == str(split.path)
    assert split.ids().to_pylist() == [row.id for row in rows]
    assert split.text_hashes().to_pylist() == [row["text_hash"] for row in expected]


def test_a_split_without_rows_is_read(tmp_path):
    prepared = write_prepared(tmp_path / "prepared", num_holdout=0)
    split = find_prepared(str(prepared)).split("holdout")
    assert (split.num_rows, split.sources, list(split.rows())) == (0, (), [])
    assert pq.read_schema(split.path).names[0] == "id"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: None, r"prepared has no split 'test', only holdout, train, validation\."),
        (lambda path: path.unlink(), r"test\.parquet cannot be read: .*Prepare it again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), r"test\.parquet cannot be read"),
        (
            lambda path: write_rows([open_row(1)], path),
            r"test\.parquet must have the 2 rows of manifest\.json, got 1 \(it is not the file",
        ),
    ],
)
def test_a_split_that_is_not_what_was_written_is_refused(change, message, prepared):
    found = find_prepared(str(prepared))
    path = prepared / "test.parquet"
    write_rows([open_row(1), open_row(2)], path)
    change(path)
    if "no split" not in message:
        found.manifest["splits"]["test"] = {"rows": 2, "by_source": {"open": 2}}
    with pytest.raises(UserError, match=message):
        found.split("test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"manifest\.json cannot be read: .* Prepare the data again"),
        (None, r"manifest\.json cannot be read: .*No such file"),
        ("[]", r"manifest\.json must be a JSON object with 'splits'"),
        ('{"format": 2, "splits": {}}', r"manifest\.json must have the format 1, got 2 \(another"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused(text, message, prepared):
    path = prepared / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=message):
        find_prepared(str(prepared))


def test_a_row_that_is_held_out_is_refused_by_its_id_and_by_its_text(prepared):
    holdout = find_prepared(str(prepared)).holdout()
    ids = ("open:4", "open:5", "verifiable:4", "verifiable:5")
    assert holdout.ids == set(ids)
    free = [("open:0", text_hash("Describe hill number 0.")), ("x", text_hash("something else"))]
    holdout.refuse(free, "data.train")
    same_id = ("open:4", text_hash("other words"))
    same_text = ("train:17", text_hash("describe  HILL\nnumber 5."))
    with pytest.raises(UserError) as raised:
        holdout.refuse([*free, same_id, same_text], "data.train")
    said = str(raised.value)
    assert said.startswith("data.train must not have rows that are held out, got 2: open:4, train:")
    assert str(prepared / "holdout_ids.json") in said
    with pytest.raises(UserError, match=r"got 8: a, a, a, a, a and 3 more"):
        holdout.refuse([("a", text_hash("Describe hill number 4."))] * 8, "data.train")


def test_two_holdouts_unite(prepared, tmp_path):
    write_json({"format": 1, "sources": {"open": {"y": "ff", "z": "ee"}}}, tmp_path / "more.json")
    one, other = find_prepared(str(prepared)).holdout(), Holdout.read(tmp_path / "more.json")
    both = one | other
    assert both.ids == one.ids | {"y", "z"}
    assert both.text_hashes >= {"ee", "ff"}
    assert both.files == (str(prepared / "holdout_ids.json"), str(tmp_path / "more.json"))
    assert (both | one).files == both.files


def test_a_list_of_ids_that_is_damaged_is_refused(tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps({"format": 1, "ids": []}))
    with pytest.raises(UserError, match=r"ids\.json must be a JSON object with 'sources'"):
        Holdout.read(tmp_path / "ids.json")


def test_prompts_with_the_same_words_have_the_same_hash():
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\u00a0caf\u00e9 2?"},
    ]
    same = ("What is cafe\u0301 2?", "  what  IS CAF\u00c9 2?\n", conversation, conversation[1:])
    assert len({text_hash(prompt) for prompt in same}) == 1
    others = ("What is cafe 2?", "What is caf\u00e9 \u00b2?", [*conversation, *conversation])
    assert len({text_hash(prompt) for prompt in (*same, *others)}) == 4
    assert text_hash("What IS 2?") == text_hash(normalised_text("What IS 2?"))
    assert len(text_hash("")) == 32
    calls = [{"role": "assistant", "content": None}, {"role": "user", "content": "What is 2?"}]
    assert text_hash(calls) == text_hash("What is 2?")


def test_a_row_is_known_by_all_its_texts_and_a_prepared_one_by_prompt_and_question():
    asked = text_hash("Why?")
    wrapped = {"prompt": "Answer briefly: why?", "extra_info": {"question": "WHY?"}, "index": 3}
    assert asked in holdout_keys("a", wrapped)
    assert holdout_keys("a", wrapped)[0] == "a"
    turns = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "why?"}]
    assert {asked, text_hash(turns)} <= {*holdout_keys("a", {"messages": turns})}
    assert asked not in holdout_keys("a", {"prompt": "Answer briefly: why?", "answers": ["Why?"]})
    prepared = {"text_hash": "ff", "prompt": "x", "question": "Why?", "answer": "3"}
    assert holdout_keys("a", prepared) == ("a", "ff", asked)


def test_a_further_holdout_is_a_file_or_the_directory_that_has_it(prepared, tmp_path):
    holdout = Holdout.of(str(prepared))
    assert holdout == Holdout.of(str(prepared / "holdout_ids.json"))
    with pytest.raises(UserError, match=r"data\.holdout must name files .*Set data\.holdout"):
        Holdout.of(str(tmp_path))


def test_prompts_have_one_hash_in_any_order_and_another_with_other_answers():
    def prompts(*pairs):
        return [Prompt(id="", text=text, token_ids=(1,), answer=one) for text, one in pairs]

    known = prompts_hash(prompts(("1+1=", "2"), ("2+2=", "4")))
    assert prompts_hash(prompts(("2+2=", "4"), ("1+1=", "2"))) == known
    assert prompts_hash(prompts(("2+2=", "5"), ("1+1=", "2"))) != known
    assert prompts_hash(prompts(("2+2=", "4"))) != known
