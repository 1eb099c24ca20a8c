"""Directories of prepared data as the data of a training, and their held-out rows."""

import json

import pytest
from data_runs import fit, flat
from prepared_data import open_row, verifiable_row, write_prepared

from lit_grpo.data import MixtureData, MixtureSource, PromptData
from lit_grpo.types import UserError

SIZES = {"num_train": 6, "num_validation": 2, "num_holdout": 2}


@pytest.fixture
def prepared(tmp_path):
    return write_prepared(tmp_path / "prepared", **SIZES)


def data(*train, **settings) -> PromptData:
    sources = [str(one) for one in train]
    return PromptData(sources, prompts_per_step=4, require_answer=False, **settings)


def row_ids(source, split) -> list[str]:
    return [row.id for row in source.rows(split)]


def write_lines(path, *texts):
    rows = [json.dumps({"prompt": text, "answer": "1"}) for text in texts]
    path.write_text("\n".join(rows))
    return path


def test_a_prepared_directory_has_the_rows_of_each_split(prepared):
    source = data(prepared)
    assert row_ids(source, "train")[:2] == ["verifiable:0", "open:0"]
    assert len(row_ids(source, "train")) == 12
    assert row_ids(source, "validation")[0] == "verifiable:6"
    assert row_ids(source, "test")[0] == "verifiable:8"
    assert row_ids(data(prepared / "validation.parquet"), "train")[0] == "verifiable:6"
    assert row_ids(data(prepared / "train.parquet"), "validation") == []
    assert row_ids(data(prepared, test=str(prepared / "train.parquet")), "test")[0] == (
        "verifiable:0"
    )


def test_only_rows_that_pass_are_read_of_each_split(prepared):
    source = data(prepared, where={"source": "open"})
    assert row_ids(source, "train") == [f"open:{n}" for n in range(6)]
    assert row_ids(source, "validation") == ["open:6", "open:7"]
    with pytest.raises(UserError, match="where must keep some rows, got .* of the 12 rows"):
        data(prepared, where={"source": "closed"}).rows("train")


def test_a_training_on_prepared_data_reads_and_validates_on_its_splits(prepared):
    module = fit(data(prepared), max_steps=3)
    assert len(set(flat(module.trained))) == 12
    assert len(set(flat(module.evaluated))) == 4


def test_the_holdout_itself_is_not_trained_on(prepared):
    with pytest.raises(UserError, match="must not have rows that are held out, got 4"):
        fit(data(prepared / "holdout.parquet"))


def test_a_held_out_row_in_another_file_is_found_by_its_text(prepared, tmp_path):
    text = verifiable_row(8)["prompt"].upper()
    path = write_lines(tmp_path / "more.jsonl", text, "another", "third", "fourth")
    with pytest.raises(UserError, match=r"got 1: more:1 .*holdout_ids\.json"):
        fit(data(prepared, path))
    fit(data(path))  # nobody knows that it is held out


def test_what_one_source_of_a_mixture_holds_out_no_other_trains_on(prepared, tmp_path):
    path = write_lines(tmp_path / "more.jsonl", open_row(9)["prompt"], "b", "c", "d")
    sources = {
        "prepared": MixtureSource(data=PromptData(str(prepared), require_answer=False)),
        "more": MixtureSource(data=PromptData(str(path))),
    }
    with pytest.raises(UserError, match="the train data of more must not .* got 1: more:1"):
        fit(MixtureData(sources, prompts_per_step=4))
