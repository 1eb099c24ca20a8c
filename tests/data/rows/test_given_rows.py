"""Rows that a program gives to a data module, as a user of Python does."""

from __future__ import annotations

from pathlib import Path

import datasets
import pandas as pd
import pyarrow
import pytest
from data_runs import fit, flat
from torch.utils.data import DataLoader

from lit_grpo.data import PromptData, RubricData, StreamData
from lit_grpo.data.rows.given_rows import as_rows
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError

ROWS = [{"prompt": f"q{n}", "answer": str(n)} for n in range(1, 7)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_dicts_are_trained_on_and_validated(kind):
    data = PromptData(train=kind(ROWS), validation=[{"prompt": "v", "answer": "1"}])
    data.prompts_per_step = 3
    module = fit(data, max_steps=2, val_check_interval=2)
    assert sorted(flat(module.trained)) == [f"train:{n}" for n in range(1, 7)]
    assert set(flat(module.evaluated)) == {"validation:1"}


def test_a_reward_cannot_change_the_rows_of_the_program():
    rows = [{"prompt": "q", "answer": "1", "words": ["a", "b"]} for _ in range(2)]
    data = PromptData(train=rows, prompts_per_step=2)
    fit(data, max_steps=1)
    first = data.train_dataloader().some_prompts()[0]
    first.columns["words"].append("c")
    with pytest.raises(TypeError, match=r"cannot be changed .* copy: dict\(prompt\.columns\)"):
        first.columns["answer"] = "0"
    assert rows == [{"prompt": "q", "answer": "1", "words": ["a", "b"]}] * 2


@pytest.mark.parametrize("kind", [pd.DataFrame, lambda rows: pyarrow.Table.from_pylist([*rows])])
def test_a_table_has_the_rows_of_its_parquet_file(kind, tmp_path):
    rows = [{"prompt": "q", "n": 1.5, "steps": [1, 2]}, {"prompt": None, "n": None, "steps": None}]
    pd.DataFrame(rows).to_parquet(tmp_path / "t.parquet")
    expected = [row.columns for row in PromptData(str(tmp_path / "t.parquet")).rows("train")]
    assert [row.columns for row in PromptData(kind(rows)).rows("train")] == expected == rows


def test_a_dataframe_may_be_held_out_from_and_validated_on():
    table = pd.DataFrame(ROWS)
    assert len(PromptData(table, validation_size=2).rows("validation")) == 2
    assert len(PromptData(ROWS, validation=table[1:]).rows("validation")) == 5
    with pytest.raises(UserError, match=r"with validation=6 rows given in Python, got 2"):
        PromptData(table, validation=table, validation_size=2)


def test_the_numbers_of_the_rows_that_are_left_of_a_dataframe_are_no_column():
    table = pd.DataFrame([*ROWS, *ROWS]).drop_duplicates("prompt")[1:]
    (first, *_) = PromptData(table).rows("train")
    assert first.columns == ROWS[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pd.DataFrame({"prompt": ["q", 1]}), r"one type each.*got DataFrame \(Conversion failed"),
        (pd.DataFrame, r"got <class 'pandas"),
        (lambda: ROWS, r"got <function .*to take what it returns, call it"),
        (DataLoader(ROWS), "got a DataLoader .*give its dataset, as loader.dataset"),
        ({"train": ROWS}, r"of a DatasetDict give a split, as data\['train'\]"),
    ],
)
def test_what_is_no_table_of_rows_is_one_line(given, message):
    with pytest.raises(UserError, match=message):
        PromptData(train=given)


@pytest.mark.parametrize("setting", ["where", "holdout"])
def test_other_settings_refuse_a_table(setting):
    with pytest.raises(UserError, match=f"^data.{setting} must be "):
        PromptData(ROWS, **{setting: pd.DataFrame(ROWS)})


def test_rows_are_filtered_held_out_and_named_in_errors():
    data = PromptData(ROWS, validation_size=2, where={"answer": ["1", "2", "3"]})
    ids = {row.id for split in ("train", "validation") for row in data.rows(split)}
    assert ids == {"train:1", "train:2", "train:3"}
    with pytest.raises(UserError, match=r"^data\.train, row 2"):
        fit(PromptData([{"prompt": "q", "answer": "1"}, {"prompt": None, "answer": "2"}]))


def test_other_data_modules_take_rows_or_say_why_not():
    (row,) = RubricData(train=ROWS[:1]).rows("train")
    assert row.columns["prompt"] == "q1"
    with pytest.raises(UserError, match=r"the name of a dataset, got rows.*PromptData takes them"):
        StreamData(train=ROWS)


@pytest.mark.parametrize("given", [ROWS[0], 5, b"t.jsonl", [["q", "1"]], [None, ROWS[0]]])
def test_what_is_neither_a_source_nor_rows_is_one_line(given):
    with pytest.raises(UserError, match=r"^data\.train must be a \.jsonl, \.parquet or \.csv file"):
        PromptData(train=given)


def test_a_path_is_taken_as_its_text(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "q", "answer": "1"}\n')
    for given in (path, [Path(path)]):
        assert [row.id for row in PromptData(given).rows("train")] == ["t:1"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [*ROWS[:2], None, *ROWS],
            r"a list of rows, each a dict, got a list whose item 3 is None\.",
        ),
        ([["q", "1"]], r"or rows, got a list whose item 1 is \['q', '1'\]\."),
        ([ROWS[0], "t.jsonl"], r"item 2 is 't\.jsonl' \(all items must be of one kind\)\."),
        (
            ["t.jsonl", ROWS[0]],
            r"a list of files or datasets, got a list whose item 2 is \{'prompt'",
        ),
        ([ROWS[:2], "t.jsonl"], r"a list of tables, got a list whose item 2 is 't\.jsonl'"),
        ([pd.DataFrame(ROWS), ROWS[0]], r"a list of tables, got a list whose item 2 is \{'prompt'"),
    ],
)
def test_the_item_of_a_list_that_is_no_row_or_of_another_kind_is_named(given, message):
    with pytest.raises(UserError, match=message):
        PromptData(train=given)


@pytest.mark.parametrize("kind", [pd.DataFrame, datasets.Dataset.from_list, list])
def test_a_list_of_tables_has_the_rows_of_all_with_ids_of_their_own(kind):
    rows = PromptData([kind(ROWS[:2]), kind(ROWS[2:])]).rows("train")
    assert [row.columns for row in rows] == ROWS
    assert [row.id for row in rows] == [f"train:{n}" for n in range(1, 7)]


def test_a_column_whose_name_is_no_text_is_refused_with_its_row():
    row = {"prompt": "x", "answer": "1", 7: "extra"}
    with pytest.raises(UserError, match=r"must be texts, got 7 in data\.train, row 2\. Write '7'"):
        PromptData(train=[ROWS[0], row])
    with pytest.raises(UserError, match=r"got 7 in row 1 of Mine\.rows\('train'\)\."):
        as_rows("Mine", "train", [row])


def test_no_rows_to_validate_on_are_not_silently_none():
    for none in ([], pd.DataFrame()):
        with pytest.raises(UserError, match="data.validation must be rows, or null, got an empty"):
            PromptData(train=[{"prompt": "a", "answer": "b"}], validation=none)


def test_half_a_character_is_refused_with_its_row():
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "\ud800", "answer": "b"}]
    with pytest.raises(UserError, match="data.train, row 2 has half a character in 'prompt'"):
        PromptData(train=rows)


def test_what_rows_returns_may_be_dicts_rows_a_table_or_nothing():
    own = Row(source="s", number=9, id="mine", columns=ROWS[1])
    first, second = as_rows("Mine", "train", [ROWS[0], own])
    assert first == Row(source="Mine", number=1, id="train:1", columns=ROWS[0])
    assert second is own
    assert [row.columns for row in as_rows("Mine", "train", pd.DataFrame(ROWS))] == ROWS
    assert as_rows("Mine", "validation", None) == []


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ("t.jsonl", "'t.jsonl'"),
        (ROWS[0], "{'prompt': 'q1', 'answer': '1'}"),
        (None, "None"),
        ([ROWS[0], ("q", "1")], r"a list whose item 2 is \('q', '1'\)"),
    ],
)
def test_what_rows_must_not_return_is_told_what_a_row_is(given, got):
    rule = (
        r"^Mine\.rows\('train'\) must return a list of rows, each a dict with its columns or a Row"
    )
    with pytest.raises(UserError, match=rf"{rule}, got {got}\.$"):
        as_rows("Mine", "train", given)
