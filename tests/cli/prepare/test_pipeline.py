"""From files to prepared data: what is kept, held out, scored and written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from killed import killed_at
from paths import ROOT

from lit_grpo.cli.prepare.join_gold import vote_key
from lit_grpo.cli.prepare.pipeline import PrepareOptions, run
from lit_grpo.cli.prepare.recipe import Duplicates, Recipe, RecipeSource, known_recipes, read_recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.cli.prepare.write import add_columns
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.types import UserError

GSM8K = ROOT.parent / "shared/data/gsm8k/train.jsonl"


class Votes(dict):
    """A cache in memory."""

    def votes(self, key):
        return self.get(key, {})

    def checked(self, key):
        return None


def sums(count):
    return [
        {"question": f"What is {n} plus {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"}
        for n in range(count)
    ]


def essays(count):
    return [
        {
            "instruction": f"Describe hill {n}.",
            "completions": [{"response": f"{n}{x}"} for x in "ab"],
        }
        for n in range(count)
    ]


def write(rows, path):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture
def data(here):
    """What replaces the data of the recipes that ship."""
    return {
        "verifiable": [write(sums(40), here / "sums.jsonl")],
        "open": [write(essays(40), here / "essays.jsonl")],
    }


def shipped(name, data, **changes):
    recipe = replace(read_recipe(name), holdout_size=6, validation_size=4)
    own = {one: files for one, files in data.items() if one in recipe.sources}
    return replace(recipe.with_data(own), **changes)


def scored(numbers):
    """A cache with the votes of these essays and sums."""
    found = Votes()
    for n in numbers:
        sums_columns = {"prompt": f"What is {n} plus {n}?", "answer": str(2 * n)}
        for columns in ({"prompt": f"Describe hill {n}."}, sums_columns):
            row = PreparedRow(origin="", id="", source="", kind="", text_hash="", columns=columns)
            for grade, x in enumerate("ab"):
                found[vote_key(row, f"{n}{x}")] = dict.fromkeys(range(3), 10 * grade)
    return found


def go(recipe, out="out", name="mine", **settings):
    return run(
        PrepareOptions(name=name, recipe=recipe, out=Path(out), **settings), lambda rows, *_: rows
    )


def rows_of(split, out="out"):
    return find_prepared(out).split(split).rows()


def test_a_mixture_is_split_by_weights_with_gold_scores_from_the_cache(data):
    manifest = go(shipped("full_mix", data), cache=scored(range(40)))
    assert {name: one["by_source"] for name, one in manifest["splits"].items()} == {
        "train": {"open": 35, "verifiable": 35},
        "validation": {"open": 2, "verifiable": 2},
        "holdout": {"open": 3, "verifiable": 3},
    }
    for row in rows_of("train"):
        if row.columns["source"] == "open":
            assert row.columns["gold_scores"] == [0.0, 1.0]
            assert row.columns["gold_spread"] == [0.0, 0.0]
            assert row.columns["question"] == row.columns["prompt"]
        else:
            assert row.columns["gold_scores"] is None
            assert row.columns["completion"].endswith(f"#### {row.columns['answer']}")
    held = find_prepared("out").holdout()
    assert held.ids == {row.id for row in rows_of("holdout")}
    assert held.text_hashes == {row.columns["text_hash"] for row in rows_of("holdout")}


def test_the_first_rows_of_the_training_data_have_the_shares_as_well(data):
    go(shipped("full_mix", data), cache=scored(range(40)))
    first = [row.columns["source"] for row in rows_of("train")[:20]]
    assert first.count("open") == 10


@pytest.mark.parametrize("name", known_recipes())
def test_only_rows_with_cached_gold_are_kept_of_every_recipe(name, data, here):
    pairs = [row | {"answers": [f"{n}a", f"{n}b"]} for n, row in enumerate(sums(40))]
    data = data | {"verifiable": [write(pairs, here / "pairs.jsonl")]}
    recipe = shipped(name, data)
    manifest = go(recipe, cache=scored(range(0, 40, 2)), only_cached=True)
    for source in recipe.sources:
        assert manifest["sources"][source]["kept"] == 20
        assert manifest["sources"][source]["dropped"] == {"gold not cached": 20}
    kept = [row for split in ("train", "validation", "holdout") for row in rows_of(split)]
    assert all(len(row.columns["gold_scores"]) == 2 for row in kept)
    assert len(find_prepared("out").holdout().ids) == 6  # those that were dropped as well


def test_without_scores_rows_are_refused_and_nothing_is_written(data, here):
    with pytest.raises(UserError, match=r"10 of 80 rows have no gold scores: open:.* and 5 more"):
        go(shipped("full_mix", data), cache=scored(range(30)))
    for name in ("open_only", "full_mix"):
        with pytest.raises(
            UserError, match=r"open has no row .*\(gold not cached: 40\).*columns\.gold"
        ):
            go(shipped(name, data), only_cached=True)
    with pytest.raises(UserError, match=r"completions to make pairs of, got none in open\. Set"):
        go(shipped("open_only", data), sft=True)
    assert not (here / "out").exists()


def test_which_rows_are_held_out_does_not_depend_on_the_cache_or_on_completions(data, here):
    go(shipped("full_mix", data), cache=scored(range(40)))
    go(shipped("full_mix", data), "warmup", sft=True)
    pairs = [row | {"answers": [f"{n}a", f"{n}b"]} for n, row in enumerate(sums(40))]
    data["verifiable"] = [write(pairs, here / "pairs.jsonl")]
    go(shipped("full_mix", data), "cached", cache=scored(range(9)), only_cached=True)
    ids = {Path(out, "holdout_ids.json").read_text() for out in ("out", "cached", "warmup")}
    assert len(ids) == 1
    assert all(row.columns["completion"] for row in rows_of("train", "warmup"))
    trained = {row.id for row in rows_of("train", "warmup")}
    assert not trained & {row.id for row in rows_of("validation")}


def test_a_holdout_is_used_again_for_other_data(data, here):
    go(shipped("verifiable_only", data), "first")
    more = {"verifiable": [write(sums(60), here / "more.jsonl")]}
    ids = Path("first/holdout_ids.json")
    manifest = go(shipped("verifiable_only", more, seed=3), holdout=ids)
    assert manifest["splits"]["holdout"]["rows"] == 6
    assert find_prepared("out").holdout().ids == find_prepared("first").holdout().ids
    other = {"verifiable": [write(sums(3), here / "few.jsonl")]}
    with pytest.raises(UserError, match="got none of verifiable"):
        go(shipped("verifiable_only", other, validation_size=3), "few", holdout=ids)
    go(shipped("verifiable_only", other, validation_size=0), "few", holdout=ids)
    assert find_prepared("few").holdout().ids == find_prepared("first").holdout().ids


@pytest.mark.parametrize("action", ["drop", "report", "refuse"])
def test_duplicates_are_dropped_reported_or_refused(action, data, here):
    long = " ".join(f"word{n}" for n in range(60))
    texts = [long, f"{long} more", "What is 0 PLUS 0?", "Other", "Words"]
    rows = [*sums(20), *({"question": text, "answer": "#### 1"} for text in texts)]
    data = {"verifiable": [write(rows, here / "copies.jsonl")]}
    duplicates = Duplicates(exact=action, near=action)
    recipe = shipped("verifiable_only", data, duplicates=duplicates)
    if action == "refuse":
        with pytest.raises(
            UserError, match=r"different prompts, got 1 exact duplicates, the first"
        ):
            go(recipe)
        near = replace(recipe, duplicates=Duplicates(exact="report", near=action))
        with pytest.raises(UserError, match=r"1 near duplicates, .* with --near_duplicates drop"):
            go(near)
        return
    manifest = go(recipe)
    source = manifest["sources"]["verifiable"]
    counts = manifest["duplicates"]
    assert sum(counts["exact"].values()) == sum(counts["near"].values()) == 1
    dropped = {"exact duplicate": 1, "near duplicate": 1} if action == "drop" else {}
    assert (source["kept"], source["dropped"]) == (25 - len(dropped), dropped)


def test_near_copies_between_splits_are_reported(here):
    long = " ".join(f"word{n}" for n in range(60))
    rows = [{"question": f"{long} {n}", "answer": "#### 1"} for n in range(20)]
    data = {"verifiable": [write(rows, here / "near.jsonl")]}
    counts = go(shipped("verifiable_only", data))["duplicates"]["near"]
    # The first row in order is held out, and all others are near to it.
    assert counts == {"holdout": 5, "train and holdout": 10, "validation and holdout": 4}


def test_filters_drop_rows_by_their_names(data):
    where = {"prompt_characters": [1, 19], "num_answers": [2, None]}
    recipe = shipped("open_only", data, holdout_size=1, validation_size=1)
    source = replace(recipe.sources["open"], where=where)
    manifest = go(replace(recipe, sources={"open": source}), cache=scored(range(40)))
    dropped = manifest["sources"]["open"]["dropped"]
    assert dropped == {}
    source = replace(source, where={"prompt_characters": [1, 16]})  # one digit
    manifest = go(replace(recipe, sources={"open": source}), cache=scored(range(40)))
    assert manifest["sources"]["open"]["dropped"] == {"filter prompt_characters": 30}
    with pytest.raises(UserError, match=r"source open has no row left of 40 \(filter answer: 40\)"):
        go(replace(recipe, sources={"open": replace(source, where={"answer": "x"})}))
    absent = (
        r"\(filter promt: 40\): no row has the column 'promt'; they have .* Did you mean prompt\?"
    )
    with pytest.raises(UserError, match=absent):
        go(replace(recipe, sources={"open": replace(source, where={"promt": "x"})}))


def test_rows_that_cannot_be_used_are_refused_with_file_and_row_or_dropped(here):
    bad = [{"question": "", "answer": "#### 1"}, {"question": "Why?", "answer": None}]
    data = {"verifiable": [write([*sums(20), *bad], here / "bad.jsonl")]}
    with pytest.raises(
        UserError, match=r"bad\.jsonl, row 21 of source verifiable cannot be used: "
    ):
        go(shipped("verifiable_only", data))
    manifest = go(shipped("verifiable_only", data), bad_rows="drop")
    dropped = manifest["sources"]["verifiable"]["dropped"]
    assert dropped == {"no prompt": 1, "no gold answer": 1}


def test_columns_of_different_types_are_refused_with_both_rows(here):
    rows = [row | {"level": n if n < 19 else "hard"} for n, row in enumerate(sums(20))]
    data = {"verifiable": [write(rows, here / "mixed.jsonl")]}
    with pytest.raises(
        UserError, match=r"level must have values of one type.*mixed\.jsonl, row 20"
    ):
        go(shipped("verifiable_only", data))


def test_ids_of_two_sources_that_are_equal_are_refused(here):
    path = write([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}], here / "a.jsonl")
    other = write([{"prompt": "c", "id": 2}], here / "b.jsonl")
    sources = {
        name: RecipeSource(kind="verifiable", data=file)
        for name, file in (("one", path), ("other", other))
    }
    with pytest.raises(
        UserError, match=r"'2' is that of .*a\.jsonl, row 2 and of .*b\.jsonl, row 1"
    ):
        go(Recipe(description="", sources=sources))


def test_the_config_names_the_sources_with_weights_and_phases(data):
    go(shipped("curriculum", data), cache=scored(range(40)))
    data = yaml.safe_load(Path("out/data.yaml").read_text())["data"]
    assert data["class_path"] == "MixtureData"
    assert data["init_args"]["curriculum"] == "0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3"
    assert data["init_args"]["sources"] == {
        name: {
            "weight": 1.0,
            "data": {
                "class_path": kind,
                "init_args": {"train": "out", "where": {"source": name}},
            },
        }
        for name, kind in (("verifiable", "PromptData"), ("open", "RubricData"))
    }


def test_prepared_data_can_be_prepared_again_with_another_filter(data):
    go(shipped("verifiable_only", data), "first")
    source = RecipeSource(
        kind="verifiable", data="first/train.parquet", where={"answer": ["2", "4", "6", "8"]}
    )
    again = Recipe(description="", sources={"verifiable": source})
    go(again, holdout=Path("first/holdout_ids.json"))
    first = {row.id: row.columns for row in rows_of("train", "first")}
    for row in rows_of("train"):
        assert dict(row.columns) == dict(first[row.id])


def test_prepared_data_can_be_prepared_again_by_the_pass_rates_of_a_policy(data):
    go(shipped("verifiable_only", data), "first")
    rates = [number / 10 for number, _ in enumerate(rows_of("train", "first"))]
    add_columns(find_prepared("first"), "train", {"pass_rate": pa.array(rates)}, {})
    source = RecipeSource(
        kind="verifiable", data="first/train.parquet", where={"pass_rate": [0.1, 0.9]}
    )
    again = Recipe(description="", sources={"verifiable": source}, validation_size=1)
    manifest = go(again, holdout=Path("first/holdout_ids.json"))
    kept = {row.columns["pass_rate"] for name in ("train", "validation") for row in rows_of(name)}
    assert kept == {number / 10 for number in range(1, 10)}
    dropped = {"filter pass_rate": len(rates) - 9}
    assert manifest["sources"]["verifiable"]["dropped"] == dropped


@pytest.mark.slow
def test_the_same_bytes_come_in_another_process_with_other_hashes_and_order_of_files(here):
    rows = sums(40)
    for name, some in (("a", rows[:25]), ("b", rows[25:])):
        write(some, here / f"{name}.jsonl")
    program = [sys.executable, "-m", "lit_grpo", "prepare", "--preset", "verifiable_only"]
    program += ["--data", "verifiable=b.jsonl,a.jsonl", "--out", "out", "--holdout_size", "5"]
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(program, check=True, env=environment, capture_output=True)
    Path("out").rename("first")
    data = {"verifiable": ["a.jsonl", "b.jsonl"]}
    go(shipped("verifiable_only", data, holdout_size=5, validation_size=0.02))
    one, other = (
        {path.name: path.read_bytes() for path in Path(out).iterdir()} for out in ("first", "out")
    )
    manifests = [json.loads(each.pop("manifest.json")) for each in (one, other)]
    assert one == other
    assert manifests[0]["splits"] == manifests[1]["splits"]


def contents() -> dict[str, bytes]:
    """Return what the files in ``out`` hold, but for what the manifest says besides the splits."""
    found = {path.name: path.read_bytes() for path in Path("out").iterdir() if path.is_file()}
    splits = json.loads(found["manifest.json"])["splits"]
    return found | {"manifest.json": json.dumps(splits).encode()}


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_data_or_the_new(data, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only matters if the machine crashes

    def prepare(seed):
        go(shipped("verifiable_only", data, seed=seed), release_holdout=True)

    prepare(1)
    new = contents()
    prepare(0)
    old, seen = contents(), []
    for moment in range(0, 200, 4):  # tests/types/test_atomic.py has every call of the exchange
        is_killed = killed_at(moment, lambda: prepare(1))
        seen.append(contents())
        if not is_killed:
            break
        if seen[-1] != old:
            prepare(0)
            assert contents() == old
    num_old = seen.count(old)
    assert seen == [old] * num_old + [new] * (len(seen) - num_old)
    assert 3 < num_old < len(seen) < 60
    assert sorted(os.listdir()) == ["essays.jsonl", "out", "sums.jsonl"]


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not there")
def test_gsm8k_is_prepared_whole():
    recipe = read_recipe("verifiable_only", [f"verifiable={GSM8K}"])
    recipe = replace(recipe, duplicates=Duplicates(near="ignore"))
    manifest = go(recipe)
    assert {name: one["rows"] for name, one in manifest["splits"].items()} == {
        "train": 7128, "validation": 145, "holdout": 200,
    }  # fmt: skip
    row = rows_of("holdout")[0]
    assert row.columns["completion"].endswith(row.columns["answer"])
