"""Directories of prepared data as the data of a training run, and their held-out rows."""

import json

import pyarrow as pa
import pytest
from data_runs import SaveEverywhere, fit, flat
from prepared_data import open_row, verifiable_row, write_prepared

from lit_grpo.cli.prepare.write import add_columns
from lit_grpo.data import MixtureData, MixtureSource, PromptData, RubricData, prompt_data
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import find_prepared
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


def test_a_directory_with_a_tilde_has_the_rows_of_each_split(prepared, monkeypatch):
    monkeypatch.setenv("HOME", str(prepared.parent))
    source = data("~/prepared")
    assert len(row_ids(source, "train")) == 12
    assert row_ids(source, "validation")[0] == "verifiable:6"
    assert row_ids(source, "test")[0] == "verifiable:8"


def test_only_rows_that_pass_are_read_of_each_split(prepared):
    source = data(prepared, where={"source": "open"})
    assert row_ids(source, "train") == [f"open:{n}" for n in range(6)]
    assert row_ids(source, "validation") == ["open:6", "open:7"]
    with pytest.raises(UserError, match="where must keep some rows, got .* of the 12 rows"):
        data(prepared, where={"source": "closed"}).rows("train")
    with pytest.raises(UserError, match=r"but no row has the column 'sauce'; they .* mean source"):
        data(prepared, where={"sauce": "open"}).rows("train")


def test_a_filter_that_leaves_no_given_held_out_row_is_refused(prepared):
    given = str(prepared / "validation.parquet")
    source = data(prepared, validation=given, where={"id": "verifiable:0"})
    assert row_ids(source, "train") == ["verifiable:0"]
    with pytest.raises(UserError, match="where must keep some rows of the held-out data, got"):
        source.rows("validation")


def with_pass_rates(directory, rates):
    add_columns(find_prepared(str(directory)), "train", {"pass_rate": pa.array(rates)}, {})
    return directory


RATES = [0.0, None, 0.1, None, 0.5, None, 0.9, None, 1.0, None, 0.05, None]
"""Of the rows to train on: verifiable, open, verifiable, ..."""


def test_rows_are_chosen_by_their_pass_rates_and_validated_on_all(prepared):
    source = data(with_pass_rates(prepared, RATES), where={"pass_rate": [0.1, 0.9]})
    assert row_ids(source, "train") == ["verifiable:1", "verifiable:2", "verifiable:3"]
    assert len(row_ids(source, "validation")) == len(row_ids(source, "test")) == 4
    with pytest.raises(UserError, match="where must keep some rows, got .* of the 12 rows"):
        data(prepared, where={"pass_rate": [0.2, 0.3]}).rows("train")


def test_a_source_of_a_mixture_is_chosen_by_its_pass_rates(prepared):
    with_pass_rates(prepared, RATES)
    where = {"source": "verifiable", "pass_rate": [0.1, 0.9]}
    sources = {
        "sums": MixtureSource(data=PromptData(str(prepared), where=where)),
        "open": MixtureSource(data=RubricData(str(prepared), where={"source": "open"})),
    }
    module = fit(MixtureData(sources, prompts_per_step=4), max_steps=3)
    found = {name for name in flat(module.trained) if name.startswith("verifiable")}
    assert found == {"verifiable:1", "verifiable:2", "verifiable:3"}
    assert {"verifiable:6", "verifiable:7"} <= set(flat(module.evaluated))


def test_many_rows_are_chosen_by_their_pass_rates(prepared, few_in_memory):
    data(prepared, max_prompt_tokens=100).rows("train")  # makes the copy that is read row by row
    with_pass_rates(prepared, RATES)
    source = data(prepared, where={"pass_rate": [0.1, 0.9]}, max_prompt_tokens=100)
    assert row_ids(source, "train") == ["verifiable:1", "verifiable:2", "verifiable:3"]


def test_a_training_on_prepared_data_reads_and_validates_on_its_splits(prepared):
    module = fit(data(prepared), max_steps=3)
    assert len(set(flat(module.trained))) == 12
    assert len(set(flat(module.evaluated))) == 4


def test_the_holdout_itself_is_not_trained_on(prepared):
    for settings in ({}, {"validation_size": 0.1}, {"validation_size": 400}):
        with pytest.raises(UserError, match=r"data\.train must not be a holdout, got .*Set it to"):
            fit(data(prepared / "holdout.parquet", **settings))


def test_a_held_out_row_in_another_file_is_found_by_its_text(prepared, tmp_path):
    text = verifiable_row(8)["prompt"].upper()
    path = write_lines(tmp_path / "more.jsonl", text, "another", "third", "fourth")
    with pytest.raises(UserError, match=r"got 1: more:1 .*holdout_ids\.json"):
        fit(data(prepared, path))
    fit(data(path))  # nobody knows that it is held out


WRAPPED = "Think step by step. {} Then answer."


def test_a_held_out_question_is_found_under_another_template(prepared, tmp_path):
    held_out = verifiable_row(8)["prompt"]
    row = {"prompt": WRAPPED.format(held_out), "answer": "1", "extra_info": {"question": held_out}}
    others = [{"prompt": f"{n}?", "answer": "1"} for n in range(3)]
    path = tmp_path / "wrapped.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, *others])))
    with pytest.raises(UserError, match=r"held out, got 1: wrapped:1 "):
        fit(data(prepared, path))
    path.write_text("\n".join(json.dumps(one | {"extra_info": {}}) for one in [row, *others]))
    fit(data(prepared, path))  # its text nowhere has the question alone


def test_a_held_out_question_is_found_if_the_template_of_the_config_wraps_it(prepared, tmp_path):
    rows = [{"task": text} for text in (verifiable_row(8)["prompt"], "b", "c", "d")]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = data(path, template="Solve: {{ task }}", holdout=str(prepared))
    with pytest.raises(UserError, match=r"held out, got 1: tasks:1 "):
        fit(source)


@pytest.mark.parametrize("role", ["holdout", "test", "validation"])
def test_what_another_directory_holds_out_is_not_trained_on_if_it_is_named(
    role, prepared, tmp_path
):
    other = write_prepared(tmp_path / "other", num_train=9)  # has rows that `prepared` holds out
    with pytest.raises(UserError, match="held out, got 2: verifiable:8, open:8"):
        fit(data(other, **{role: str(prepared)}))
    ids = prepared / "holdout_ids.json"
    with pytest.raises(UserError, match=rf"which .*{ids} lists"):
        fit(data(other, holdout=[str(ids)]))
    if role == "holdout":
        fit(data(other))  # nobody knows


def test_null_answers_are_counted_among_all_rows_of_the_files(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": None if n % 16 == 0 else "1"} for n in range(80)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"^5 of 80 rows have no gold answer in 'answer'"):
        fit(PromptData(str(path), validation_size=0.1, prompts_per_step=4))


def test_what_one_source_of_a_mixture_holds_out_no_other_trains_on(prepared, tmp_path):
    path = write_lines(tmp_path / "more.jsonl", open_row(9)["prompt"], "b", "c", "d")
    sources = {
        "prepared": MixtureSource(data=PromptData(str(prepared), require_answer=False)),
        "more": MixtureSource(data=PromptData(str(path))),
    }
    with pytest.raises(UserError, match="the train data of more must not .* got 1: more:1"):
        fit(MixtureData(sources, prompts_per_step=4))


@pytest.fixture
def few_in_memory(monkeypatch):
    monkeypatch.setattr(prompt_data, "MAX_ROWS_IN_MEMORY", 5)


def test_many_rows_are_tokenized_when_a_step_needs_them(prepared, few_in_memory, tmp_path):
    source = data(prepared, max_prompt_tokens=100)
    rows = source.rows("train")
    assert isinstance(rows, MappedRows)
    assert [*rows] == [*find_prepared(str(prepared)).split("train").rows()]
    assert isinstance(source.rows("validation"), list)
    saver = SaveEverywhere(tmp_path)
    module = fit(source, saver, max_steps=8, max_epochs=-1)
    assert [len(set(batch)) for batch in module.trained] == [4] * 8
    assert len(set(flat(module.trained[:3]))) == 12
    assert module.trained[:3] != module.trained[3:6]
    assert len(set(flat(module.evaluated))) == 4
    for step, hook, path in saver.saved:
        again = data(prepared, max_prompt_tokens=100)
        resumed = fit(again, checkpoint=path, max_steps=8, max_epochs=-1)
        assert resumed.trained == module.trained[step:], f"{hook} after step {step}"


def test_long_prompts_of_many_rows_are_passed_over(prepared, few_in_memory):
    source = data(prepared, where={"source": ["open", "verifiable"]}, max_prompt_tokens=22)
    module = fit(source, max_steps=2)
    assert {name.split(":")[0] for name in flat(module.trained)} == {"verifiable"}
    with pytest.raises(UserError, match="none of the 12 prompts is within max_prompt_tokens"):
        fit(data(prepared / "train.parquet", max_prompt_tokens=3), max_steps=1)


def test_many_rows_need_a_limit_since_their_lengths_are_not_known(prepared, few_in_memory):
    with pytest.raises(UserError, match=r"has 12 rows, .* Set data.max_prompt_tokens"):
        fit(data(prepared))


def test_many_rows_are_held_out_by_number_and_refused_as_few_are(prepared, few_in_memory):
    few = data(prepared, validation_size=3, max_prompt_tokens=100)
    many = [row_ids(few, split) for split in ("train", "validation")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_data, "MAX_ROWS_IN_MEMORY", 100)
        assert [row_ids(few, split) for split in ("train", "validation")] == many
    assert [len(one) for one in many] == [9, 3]


def test_held_out_rows_among_many_are_refused(prepared, few_in_memory, tmp_path):
    larger = write_prepared(tmp_path / "larger", num_train=9)
    sources = {
        name: MixtureSource(data=PromptData(str(path), require_answer=False, max_prompt_tokens=100))
        for name, path in (("small", prepared), ("large", larger))
    }
    with pytest.raises(UserError, match="the train data of large must not .* got 2: verifiable:8"):
        fit(MixtureData(sources, prompts_per_step=4))


def test_rubrics_of_many_rows_show_the_same_excerpts(prepared, few_in_memory):
    def prompts(source) -> dict[str, str]:
        module = fit(MixtureData({"open": MixtureSource(data=source)}, prompts_per_step=4))
        found = module.trainer.train_dataloader.some_prompts()
        return {prompt.id: prompt.text for prompt in found}

    settings = {"where": {"source": "open"}, "use_contrastive": True}
    many = prompts(RubricData(str(prepared), **settings, max_prompt_tokens=1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_data, "MAX_ROWS_IN_MEMORY", 100)
        assert prompts(RubricData(str(prepared), **settings)) == many
    assert len(many) == 6
    assert all("is green and steep." in text for text in many.values())
