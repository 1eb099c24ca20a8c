"""``lit-grpo prepare``: what each recipe is made of, and data made by one."""

from __future__ import annotations

import json
import os
import re

import pytest
import yaml

from lit_grpo.__main__ import main
from lit_grpo.cli.file_options import parse_options
from lit_grpo.cli.prepare.command import _cache, _options
from lit_grpo.cli.prepare.recipe import read_recipe
from lit_grpo.data.rows.prepared import find_prepared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: prepare needs a directory to write: set --out DIR, or --list the recipes.\n"),
        (["--lst"], "error: unrecognized arguments: --lst. See lit-grpo prepare --help.\n"),
        (["--out", "x", "--seed", "y"], "error: --seed: invalid int value: 'y'. See lit-grpo pr"),
        (["--out", "x", "--duplicates", "ignore"], "error: --duplicates: invalid choice: 'ignore'"),
        (["--out", "x", "--holdout", "f", "--holdout_size", "3"], "error: holdout_size must be le"),
        (["--list", "x"], "error: unrecognized arguments: x. See lit-grpo prepare --help.\n"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(["prepare", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_recipe_that_cannot_be_read_is_named(here, capsys):
    (here / "configs/data").mkdir(parents=True)
    (here / "configs/data/mine.yaml").write_text("description: x\nsources: {a: {kind: open}}")
    assert main(["prepare", "--list"]) == 2
    said = capsys.readouterr().err
    assert said == "error: configs/data/mine.yaml: sources.a: data: required, but not set.\n"


def write_sums(path, count=30):
    rows = (
        {"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"}
        for n in range(count)
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_data_are_prepared_and_the_table_says_what_became_of_the_rows(here, capsys):
    write_sums(here / "sums.jsonl")
    with (here / "sums.jsonl").open("a") as file:
        file.write('{"question": "what is 1 PLUS 1?", "answer": "#### 2"}\n')
    arguments = ["--preset", "verifiable_only", "--data", "verifiable=sums.jsonl"]
    assert main(["prepare", *arguments, "--out", "out", "--holdout-size", "6"]) == 0
    said = capsys.readouterr()
    header, sums, copies, following = said.out.splitlines()
    assert header.split() == [
        "source",
        "read",
        "kept",
        *["train", "validation", "holdout", "dropped"],
    ]
    assert sums.split() == ["verifiable", "31", "30", "24", "0", "6", "exact", "duplicate:", "1"]
    assert copies in {f"1 exact duplicate, within {name}" for name in ("train", "holdout")}
    assert following == "next: lit-grpo fit --config YOURS.yaml --config out/data.yaml"
    assert said.err == ""
    assert sorted(os.listdir("out")) == [
        *("data.yaml", "holdout.parquet", "holdout_ids.json", "manifest.json"),
        *("train.parquet", "validation.parquet"),
    ]


def test_flags_change_the_recipe_and_json_is_the_manifest(here, capsys):
    write_sums(here / "sums.jsonl")
    arguments = ["--preset", "verifiable_only", "--data", "verifiable=sums.jsonl", "--out", "out"]
    flags = ["--holdout_size=5", "--validation_size=0.2", "--seed=7", "--size=12", "--json"]
    assert main(["prepare", *arguments, *flags]) == 0
    manifest = json.loads(capsys.readouterr().out)
    assert manifest == json.loads((here / "out/manifest.json").read_text())
    numbers = {name: one["rows"] for name, one in manifest["splits"].items()}
    assert numbers == {"holdout": 5, "validation": 5, "train": 12}
    assert manifest["seed"] == 7
    assert manifest["sources"]["verifiable"]["dropped"] == {"beyond size": 8}


def test_the_other_flags_reach_what_they_are_for(here):
    flags = "--only_cached --sft --duplicates refuse --near_duplicates ignore"
    arguments = ["--preset", "open_only", "--out", "o", "--bad_rows", "drop", *flags.split()]
    options = _options(parse_options("prepare", arguments))
    assert (options.only_cached, options.sft, options.bad_rows) == (True, True, "drop")
    assert (options.recipe.duplicates.exact, options.recipe.duplicates.near) == ("refuse", "ignore")
    plain = _options(parse_options("prepare", ["--out", "o"]))
    assert plain.recipe.duplicates.near == "report"


def test_pairs_for_a_warm_up_have_the_same_holdout(here, capsys):
    write_sums(here / "sums.jsonl")
    arguments = ["--preset", "verifiable_only", "--data", "verifiable=sums.jsonl"]
    for out, flags in (("out", []), ("warmup", ["--sft"])):
        assert main(["prepare", *arguments, "--out", out, "--holdout_size", "5", *flags]) == 0
    assert (
        "next: lit-grpo sft --config YOURS.yaml --config warmup/data.yaml"
        in capsys.readouterr().out
    )
    ids = [(here / out / "holdout_ids.json").read_bytes() for out in ("out", "warmup")]
    assert ids[0] == ids[1]
    rows = find_prepared("warmup").split("train").rows()
    assert len(rows) == 25 - len(find_prepared("warmup").split("validation").rows())
    assert all(row.columns["completion"].count("####") == 1 for row in rows)
    config = yaml.safe_load((here / "warmup/data.yaml").read_text())
    assert config["model"] == {"target_column": "completion"}


def test_a_source_without_completions_gives_no_pairs_and_a_remark_says_so(here, capsys):
    write_sums(here / "sums.jsonl")
    plain = [{"prompt": f"What is 7 times {n}?", "answer": str(7 * n)} for n in range(9)]
    (here / "plain.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in plain))
    columns = {"prompt": "question", "completion": "answer"}
    sources = {
        "worked": {"kind": "verifiable", "data": "sums.jsonl", "columns": columns},
        "plain": {"kind": "verifiable", "data": "plain.jsonl"},
    }
    (here / "mine.yaml").write_text(yaml.safe_dump({"description": "x", "sources": sources}))
    assert main(["prepare", "--preset", "mine.yaml", "--out", "out", "--sft"]) == 0
    shown = capsys.readouterr().out
    assert "plain gives no pairs, since its rows have no completion" in shown
    assert "worked gives" not in shown
    rows = find_prepared("out").split("train").rows()
    assert {row.columns["source"] for row in rows} == {"worked"}


def test_a_file_without_the_column_that_a_preset_maps_is_told_how_to_map_its_own(here, capsys):
    plain = [{"prompt": f"What is 7 times {n}?", "answer": str(7 * n)} for n in range(300)]
    (here / "plain.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in plain))
    preset = ["--preset", "verifiable_only", "--data", "verifiable=plain.jsonl"]
    assert main(["prepare", *preset, "--out", "out"]) == 2
    shown = capsys.readouterr().err
    assert "plain.jsonl must have the column 'question', from which verifiable_only takes" in shown
    assert "the prompt of the source verifiable, got prompt, answer. " in shown
    recipe = re.search(r"a file of your own with (\{.*\}); a column called prompt needs no", shown)
    own = yaml.safe_load(recipe[1])
    own["sources"]["verifiable"]["columns"]["prompt"] = "prompt"
    (here / "own.yaml").write_text(yaml.safe_dump(own))
    assert main(["prepare", "--preset", "own.yaml", "--out", "out"]) == 0
    own["sources"]["verifiable"]["columns"]["answer"] = "gold"
    (here / "own.yaml").write_text(yaml.safe_dump(own))
    assert main(["prepare", "--preset", "own.yaml", "--out", "out"]) == 2
    assert "takes the answer of the source verifiable" in (shown := capsys.readouterr().err)
    assert "Set sources.verifiable.columns: {answer: NAME}." in shown


def test_an_error_leaves_what_was_prepared_before(here, capsys):
    write_sums(here / "sums.jsonl")
    arguments = ["--preset", "verifiable_only", "--data", "verifiable=sums.jsonl", "--out", "out"]
    assert main(["prepare", *arguments, "--holdout_size", "5"]) == 0
    before = {path.name: path.read_bytes() for path in (here / "out").iterdir()}
    assert main(["prepare", *arguments, "--holdout_size", "30"]) == 2
    assert "got none of verifiable: of 30 prompts 30 are held out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (here / "out").iterdir()} == before
    assert sorted(os.listdir(here)) == ["out", "sums.jsonl"]


def test_a_directory_with_other_files_is_not_replaced(here, capsys):
    write_sums(here / "sums.jsonl")
    (here / "mine").mkdir()
    (here / "mine/notes.txt").write_text("keep")
    arguments = ["--preset", "verifiable_only", "--data", "verifiable=sums.jsonl"]
    assert main(["prepare", *arguments, "--holdout_size", "5", "--out", "mine"]) == 2
    assert "mine must be a new directory or one of prepared data" in capsys.readouterr().err
    assert os.listdir(here / "mine") == ["notes.txt"]


def test_the_cache_of_a_recipe_may_be_in_the_home_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    source = {"kind": "verifiable", "data": "a.jsonl"}
    recipe = {"description": "x", "sources": {"a": source}, "gold": {"cache": "~/scores"}}
    (here / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert _cache(read_recipe("mine.yaml"), None) is None
    (here / "scores").mkdir()
    assert _cache(read_recipe("mine.yaml"), None) is not None
