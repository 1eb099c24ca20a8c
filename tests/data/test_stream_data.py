"""Trainings on streamed datasets: settings, filters, and the same rows after a resume."""

import json

import datasets
import pytest
from data_runs import SHARD_SIZES, SaveEverywhere, fit, flat, write_shards
from prepared_data import verifiable_row, write_prepared

from lit_grpo.data import Adaptive, MixtureData, MixtureSource, PromptData, StreamData
from lit_grpo.types import UserError


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "shards")


def stream(shards, **settings) -> StreamData:
    chosen = {"window": 3, "steps_per_epoch": 2, "prompts_per_step": 4} | settings
    return StreamData(str(shards), **chosen)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_rows_of_an_uninterrupted_one(shards, tmp_path):
    saver = SaveEverywhere(tmp_path)
    expected = fit(stream(shards), saver, max_steps=11, max_epochs=-1).trained
    assert len(expected) == 11
    assert len(set(flat(expected[:4]))) == 16
    for step, hook, path in saver.saved:
        resumed = fit(stream(shards), checkpoint=path, max_steps=11, max_epochs=-1).trained
        assert resumed == expected[step:], f"{hook} after step {step}"


def test_rows_that_are_filtered_too_long_or_held_out_are_passed_over(shards, tmp_path):
    module = fit(stream(shards, where={"answer": ["3", "4"]}), max_steps=3)
    answers = [sum(map(int, one.split(":")[1:])) for one in set(flat(module.trained))]
    assert set(answers) == {3, 4}
    prepared = write_prepared(tmp_path / "prepared", num_train=6, num_holdout=1)
    (shards / "more.jsonl").write_text(json.dumps(verifiable_row(8)) + "\n")  # is held out there
    sources = {
        "table": MixtureSource(data=PromptData(str(prepared), require_answer=False)),
        "stream": MixtureSource(data=StreamData(str(shards), max_prompt_tokens=20)),
    }
    data = MixtureData(sources, prompts_per_step=4)
    module = fit(data, max_steps=20, max_epochs=-1)
    assert [len([one for one in batch if "shards" in one]) for batch in module.trained] == [2] * 20
    assert len({one for one in flat(module.trained) if "shards" in one}) == sum(SHARD_SIZES)


def test_a_saved_dataset_and_a_split_are_streamed(shards, tmp_path):
    rows = [{"prompt": f"{n}", "answer": "1"} for n in range(8)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert len(set(flat(fit(stream(tmp_path / "saved"), max_steps=2).trained))) == 8
    assert fit(stream(f"{shards}:train"), max_steps=1).trained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, r"data.window must be >= 1, got 0"),
        ({"steps_per_epoch": 0}, "data.steps_per_epoch must be >= 1"),
        ({"validation_size": 3}, "data.validation_size must be 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        StreamData("x", **settings)


def test_a_stream_without_a_row_to_train_on_and_one_that_is_not_there_are_errors(shards):
    with pytest.raises(UserError, match="has no prompt to train on: all rows are filtered"):
        fit(stream(shards, where={"answer": "none"}), max_steps=1)
    with pytest.raises(UserError, match=r"absent: no such file or directory"):
        fit(StreamData("./absent"), max_steps=1)
    with pytest.raises(UserError, match=r"data.train must be one dataset"):
        StreamData([str(shards), str(shards)])
    file = min(shards.iterdir())
    with pytest.raises(UserError, match=f"got the file {file} .*PromptData reads single files"):
        StreamData(str(file))
    adaptive = MixtureSource(data=StreamData(str(shards)), adaptive=Adaptive())
    with pytest.raises(UserError, match=r"adaptive must be null"):
        fit(MixtureData({"a": adaptive}, prompts_per_step=4))
