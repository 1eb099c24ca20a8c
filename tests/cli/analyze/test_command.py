"""``lit-grpo analyze`` of prepared data, a cache and a run."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_data import write_prepared

from lit_grpo.__main__ import main
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers, JudgeVotes
from lit_grpo.cli.prepare.join_gold import Checked, vote_key
from lit_grpo.cli.prepare.recipe import Recipe, RecipeSource
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.judge import Judge
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.runs.files.completions import write_table


def measured(capsys, *arguments, code=0):
    assert main(["analyze", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


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


def test_a_cache_is_measured_by_question_and_by_vote(here, capsys):
    recipe = Recipe(
        description="",
        sources={"open": RecipeSource(kind="open", data="x")},
        judge=Judge(model="m", temperature=1.0),
    )
    scorer = Scorer.of(recipe)
    directory = scorer.directory(Path("gold"))
    scorer.write(directory)
    votes = JudgeVotes(directory)
    for prompt, grades in (("Why?", ((9, 9), (1, 3))), ("How?", ((5, 5), (5, 5)))):
        row = PreparedRow(
            origin="", id="", source="", kind="open", text_hash="", columns={"prompt": prompt}
        )
        for answer, of_answer in zip("ab", grades, strict=True):
            for number, grade in enumerate(of_answer):
                votes.add(vote_key(row, answer), number, grade, 0.0)
    votes.close()
    assert measured(capsys, "gold")["measures"]["all"]["num_null"] == 0
    votes = JudgeVotes(directory)
    votes.add("f" * 32, 0, 5, 0.0)
    votes.close()
    checked = CheckedAnswers(Path("gold"))
    checked.add("k", Checked(answers=("2", "3"), gold_scores=(1.0, 0.0)))
    checked.close()
    found = measured(capsys, "gold")
    assert found["kind"] == "cache"
    judged = found["measures"][directory.name]
    assert (judged["num_rows"], judged["num_null"], judged["signal_useful_pct"]) == (3, 1, 33.33)
    assert judged["vote_agreement"] == (3 * 1.0 + 0.5) / 4
    assert judged["vote_deviation"] == 0.025  # 0.1 of one answer in four
    assert judged["spread_histogram"][14] == 1  # 0.9 and 0.2
    assert found["measures"]["program"]["signal_useful_pct"] == 100.0
    assert found["measures"]["all"]["num_rows"] == 4
    (directory / "fingerprint.json").unlink()
    assert main(["analyze", "gold"]) == 2
    assert "fingerprint.json cannot be read" in capsys.readouterr().err


def write_run(rewards, *, prompt_id="p{}", is_old=False):
    for step, groups in enumerate(rewards):
        rows = [
            {
                "step": step,
                **({} if is_old else {"group": number}),
                "prompt_id": prompt_id.format(number),
                "source": "",
                "prompt": "1+1=",
                "num_tokens": 3,
                "reward": reward,
                "valid": reward is not None,
            }
            for number, group in enumerate(groups)
            for reward in group
        ]
        write_table(pa.Table.from_pylist(rows), Path(f"run/completions/step_{step:06}.parquet"))


def test_the_groups_of_a_run_have_signal_if_their_rewards_differ_at_all(here, capsys):
    write_run([[(0.0, 0.01), (1.0, 1.0)], [(None, 1.0), (None, None)], [(0.0, 1.0)]])
    found = measured(capsys, "run")
    one = found["measures"]["all"]
    assert (found["kind"], found["threshold"]) == ("run", 0.0)
    assert (one["num_rows"], one["num_null"], one["signal_useful_pct"]) == (5, 2, 40.0)
    assert one["answer_lengths"]["max"] == 3
    assert one["num_duplicates"] is None
    strict = measured(capsys, "run", "--threshold", "0.1")
    assert strict["measures"]["all"]["signal_useful_pct"] == 20.0


@pytest.mark.parametrize("is_old", [False, True])
def test_groups_of_one_prompt_in_one_step_are_told_apart(here, capsys, is_old):
    """Older versions did not number the groups of a file, which all have one size."""
    rewards = [[(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]]
    write_run(rewards, prompt_id="p", is_old=is_old)
    path = Path("run/completions/step_000000.parquet")
    rows = pq.read_table(path).to_pylist()
    for row in rows[4:]:
        row["prompt_id"] = "other"
    write_table(pa.Table.from_pylist(rows), path)
    one = measured(capsys, "run")["measures"]["all"]
    assert (one["num_rows"], one["signal_useful_pct"]) == (3, 33.33)


def test_a_damaged_file_of_a_run_is_named(here, capsys):
    write_run([[(0.0, 1.0)], [(1.0, 1.0)]])
    damaged = Path("run/completions/step_000001.parquet")
    damaged.write_bytes(b"")
    assert main(["analyze", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {damaged} cannot be read: ")
    assert line.endswith("Move it away to go on without it.")
    damaged.rename("elsewhere")
    assert measured(capsys, "run")["measures"]["all"]["num_rows"] == 1


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
            "error: nothing must be a directory of prepared data, a cache of gold scores or a run, "
            "got nothing: there is no /",
        ),
        (
            ["."],
            "error: . must be a directory of prepared data, a cache of gold scores or a run, got o",
        ),
        (
            ["data/manifest.json"],
            "error: data/manifest.json must be a directory of prepared data, a cache of gold "
            "scores or a run, got a file. Name one that",
        ),
        ([], "error: analyze needs DATA: prepared data, a cache of gold scores, or a run. For exa"),
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
    assert said.err == f"error: picture must end in .png or .svg, got {name}. Set --picture.\n"
    assert not said.out
    assert not Path(name).exists()
