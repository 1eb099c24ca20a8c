"""``lit-grpo analyze`` of prepared data, a cache and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from analyzed import measured, write_run
from prepared_data import write_prepared

from lit_grpo.__main__ import main
from lit_grpo.policy.byte_tokenizer import byte_tokenizer


def test_prepared_data_are_measured_by_source(here, capsys):
    write_prepared(here / "data", num_train=10, num_holdout=3)
    found = measured(capsys, "data")
    assert (found["kind"], found["threshold"]) == ("prepared", 0.1)
    assert found["length_unit"] == "characters / 4"
    both, one, other = (found["measures"][name] for name in ("all", "open", "verifiable"))
    assert (both["num_rows"], both["num_compared"], both["num_null"]) == (20, 10, 0)
    assert both["signal_useful_pct"] == one["signal_useful_pct"] == 100.0
    assert other["signal_useful_pct"] is None
    assert one["spread_histogram"][18] == 10
    assert one["vote_deviation"] == 0.1
    assert one["prompt_lengths"]["max"] == 5.8  # 23 characters
    assert both["num_duplicates"] == 0
    assert measured(capsys, "data", "--split", "holdout")["measures"]["all"]["num_rows"] == 6
    of_file = measured(capsys, "data/holdout.parquet")
    assert of_file["measures"]["all"]["num_rows"] == 6
    assert measured(capsys, "data/train.parquet") == found | {"data": "data/train.parquet"}


def test_lengths_are_in_tokens_of_a_tokenizer(here, capsys):
    write_prepared(here / "data")
    byte_tokenizer().save_pretrained(here / "bytes")
    found = measured(capsys, "data", "--tokenizer", "bytes")
    assert found["length_unit"] == "tokens"
    assert found["measures"]["open"]["prompt_lengths"]["max"] == len("Describe hill number 0.")
    assert main(["analyze", "data", "--tokenizer", "data"]) == 2
    assert capsys.readouterr().err.startswith("error: tokenizer must be the path or the Hub id of ")


def test_too_little_signal_is_exit_code_1(here, capsys):
    write_run([[(0.0, 1.0)], [(1.0, 1.0)]])
    assert measured(capsys, "run", "--min_signal", "51", code=1)
    assert measured(capsys, "run", "--min_signal", "50", code=0)
    assert main(["analyze", "run", "--min_signal", "51"]) == 1
    assert capsys.readouterr().err == "signal 50% is below --min_signal 51\n"
    write_prepared(here / "data", num_train=1)
    assert main(["analyze", "data", "--min_signal", "90"]) == 0


def test_the_copies_that_prepare_has_found_are_said(here, capsys):
    path = write_prepared(here / "data") / "manifest.json"
    counts = {"exact": {"train": 3}, "near": {"train and holdout": 1}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"duplicates": counts}))
    assert measured(capsys, "data")["duplicates_when_prepared"] == counts
    assert main(["analyze", "data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "when it was prepared: 3 exact duplicates, within train",
        "when it was prepared: 1 near duplicate, between train and holdout",
    ]


def test_the_table_has_a_column_for_each_source(here, capsys):
    write_prepared(here / "data")
    assert main(["analyze", "data"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["all", "open", "verifiable"]
    table = {" ".join(line[:-3]): line[-3:] for line in lines[1:]}
    assert table["rows"] == ["16", "8", "8"]
    assert table["signal"] == ["100.0%", "100.0%", "–"]
    assert table["deviation of votes"] == ["0.100", "0.100", "–"]
    assert "█" in " ".join(lines[6])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nothing"],
            "error: nothing must be a directory of prepared data, a cache of gold scores, a run or "
            "a .parquet file of completions, got nothing: there is no /",
        ),
        (
            ["."],
            "error: . must be a directory of prepared data, a cache of gold scores, a run or a .pa",
        ),
        (
            ["data/manifest.json"],
            "error: data/manifest.json must be a directory of prepared data, a cache of gold "
            "scores, a run or a .parquet file of completions, got a file. Name one that",
        ),
        ([], "error: analyze needs DATA: prepared data, a cache of gold scores, a run, or a .p"),
        (["data", "--split", "x"], "error: data has no split 'x', only holdout, train, validation"),
        (["data", "--threshold", "-1"], "error: threshold must be >= 0, got -1"),
        (["data", "--min_signal", "101"], "error: min_signal must be from 0 to 100, got 101"),
        (["empty"], "error: empty has no completions/step_*.parquet: name a run that has begun."),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, message, here, capsys):
    write_prepared(here / "data")
    (here / "empty/completions").mkdir(parents=True)
    assert main(["analyze", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_data_without_rows_to_compare_cannot_be_asked_for_their_signal(here, capsys):
    (here / "gold/program").mkdir(parents=True)
    assert main(["analyze", "gold", "--min_signal", "50"]) == 2
    assert "min_signal needs rows that are compared by scores" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["p2.gif", "picture"])
def test_a_picture_of_another_type_is_refused(here, capsys, name):
    write_prepared(here / "data")
    assert main(["analyze", "data", "--picture", name]) == 2
    said = capsys.readouterr()
    rule = "--picture must be a name that ends in .png or .svg"
    assert said.err == f"error: {rule}, got {name}. Set --picture.\n"
    assert not said.out
    assert not Path(name).exists()
