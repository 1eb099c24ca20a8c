"""Rows that a program gives to a data module, as a user of Python does."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_runs import fit, flat

from lit_grpo.data import PromptData, RubricData, StreamData
from lit_grpo.types import UserError

ROWS = [{"prompt": f"q{n}", "answer": str(n)} for n in range(1, 7)]


@pytest.mark.parametrize("kind", [list, tuple])
def test_dicts_are_trained_on_and_validated(kind):
    data = PromptData(train=kind(ROWS), validation=[{"prompt": "v", "answer": "1"}])
    data.prompts_per_step = 3
    module = fit(data, max_steps=2, val_check_interval=2)
    assert sorted(flat(module.trained)) == [f"train:{n}" for n in range(1, 7)]
    assert set(flat(module.evaluated)) == {"validation:1"}


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


@pytest.mark.parametrize("given", [ROWS[0], 5, [ROWS[0], "train.jsonl"], [["q", "1"]]])
def test_what_is_neither_a_source_nor_rows_is_one_line(given):
    with pytest.raises(UserError, match=r"^data\.train must be a \.jsonl, \.parquet or \.csv file"):
        PromptData(train=given)


def test_a_path_is_taken_as_its_text(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "q", "answer": "1"}\n')
    for given in (path, [Path(path)]):
        assert [row.id for row in PromptData(given).rows("train")] == ["t:1"]
