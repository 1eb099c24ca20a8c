"""Recipes: those that ship, a user's own, and what is said of one that is wrong."""

from __future__ import annotations

import socket

import pytest
import yaml

from lit_grpo.cli.prepare.recipe import known_recipes, read_recipe
from lit_grpo.types import UserError

SOURCE = {"kind": "verifiable", "data": "rows.jsonl"}
RECIPE = {"description": "mine", "sources": {"sums": SOURCE}}


def write(path, **keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(RECIPE | keys))
    return str(path)


def error_of(path, **keys) -> str:
    with pytest.raises(UserError) as raised:
        read_recipe(write(path, **keys))
    return str(raised.value)


def test_the_recipes_that_ship_are_read_without_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("a recipe must be read without network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    recipes = {name: read_recipe(name) for name in known_recipes()}
    kinds = {
        name: {one.kind: (recipe.share(key), one.needs_gold) for key, one in recipe.sources.items()}
        for name, recipe in recipes.items()
    }
    both = {"verifiable": (0.5, False), "open": (0.5, True)}
    assert kinds == {
        "open_only": {"open": (1.0, True)},
        "verifiable_only": {"verifiable": (1.0, False)},
        "curriculum": both,
        "full_mix": both,
    }
    assert recipes["curriculum"].curriculum == "0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3"
    for recipe in recipes.values():
        assert (recipe.judge is not None) == ("open" in recipe.sources)
        assert recipe.holdout_size > 0


def test_a_file_of_the_user_has_defaults_for_all_but_its_sources(tmp_path):
    recipe = read_recipe(write(tmp_path / "mine.yaml"))
    assert (recipe.seed, recipe.size, recipe.holdout_size, recipe.judge) == (0, None, 0, None)
    assert (recipe.duplicates.exact, recipe.gold.num_evals) == ("drop", 3)
    source = recipe.sources["sums"]
    assert (source.files, source.weight, source.needs_gold) == (["rows.jsonl"], 1.0, False)


def test_shares_follow_from_weights_and_gold_may_be_asked_of_any_source(tmp_path):
    sources = {"sums": SOURCE | {"weight": 3, "scored": True}, "more": SOURCE}
    recipe = read_recipe(write(tmp_path / "mine.yaml", sources=sources))
    assert (recipe.share("sums"), recipe.share("more")) == (0.75, 0.25)
    assert recipe.sources["sums"].needs_gold


def test_names_are_those_of_files_in_configs_data_which_come_before_those_that_ship(tmp_path):
    for name in ("mine", "open_only"):
        write(tmp_path / f"configs/data/{name}.yaml", description=f"my {name}")
    assert {"mine", "curriculum"} <= set(known_recipes())
    assert read_recipe("mine").description == "my mine"
    assert read_recipe("open_only").description == "my open_only"
    assert read_recipe("full_mix").description != "my full_mix"


def test_the_data_of_a_source_can_be_replaced():
    recipe = read_recipe("full_mix", ["open=a.jsonl,b.parquet"])
    assert recipe.sources["open"].files == ["a.jsonl", "b.parquet"]
    assert recipe.sources["open"].columns["question"] == "instruction"
    assert recipe.sources["verifiable"].files == ["openai/gsm8k:main:train"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("full_mx", (), r"full_mx: no such recipe\. Did you mean full_mix\? Known: curriculum, fu"),
        ("full_mix", ["opn=a.jsonl"], r"opn=…: the recipe has no such source\. Did you mean open"),
        ("full_mix", ["a.jsonl"], r"data must be SOURCE=FILE or .*, got a\.jsonl\. Set --data\."),
        ("full_mix", ["open="], r"data must be SOURCE=FILE or"),
    ],
)
def test_an_unknown_recipe_or_source_is_refused(name, data, message):
    with pytest.raises(UserError, match=message):
        read_recipe(name, data)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sede": 1}, "sede: no such key. Did you mean seed?"),
        ({"sede": {}}, "sede: no such key. Did you mean seed?"),
        ({"seed": "x"}, "seed: expected int, got x."),
        ({"seed": -1}, "seed must be >= 0, got -1. Set seed."),
        ({"size": 0}, "size must be >= 1, got 0. Set size."),
        ({"holdout_size": -5}, "holdout_size must be >= 0, got -5."),
        ({"validation_size": 1.5}, "must be a whole number, or a fraction below 1, got 1.5. Set"),
        ({"validation_size": 1.0}, "must be a whole number, or a fraction below 1, got 1.0. Set"),
        ({"curriculum": "1:1:1"}, "curriculum must be a list of phases unless"),
        ({"sources": {}}, "sources must be one source or more, got none."),
        ({"sources": None}, "sources must be a mapping of names to sources, got None."),
        ({"sources": {"a-b": SOURCE}}, "sources must be called by letters, digits and _, got 'a-b"),
        ({"sources": {"sums": None}}, "sources.sums: expected keys under it, got None."),
        (
            {"duplicates": {"exact": "ignore"}},
            "duplicates.exact: expected one of drop, report, refuse",
        ),
        ({"duplicates": {"threshold": 2}}, "duplicates.threshold must be positive and <= 1, got 2"),
        ({"gold": {"num_eval": 2}}, "gold.num_eval: no such key. Did you mean num_evals?"),
        ({"gold": {"num_evals": 0}}, "gold.num_evals must be >= 1, got 0"),
        ({"judge": {"modle": "m"}}, "judge: modle: no such key. Did you mean model?"),
        (
            {"judge": {"model": "m", "limits": {"max_concurency": 2}}},
            "limits.max_concurency: no such key. Did you mean max_concurrency?",
        ),
    ],
)
def test_a_wrong_recipe_names_its_file_and_the_key(keys, message, tmp_path):
    path = tmp_path / "mine.yaml"
    said = error_of(path, **keys)
    assert said.startswith(f"{path}: ")
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weigth": 1}, "weigth: no such key. Did you mean weight?"),
        ({"weigth": {}}, "weigth: no such key. Did you mean weight?"),
        ({"kind": "opn"}, "kind: expected one of verifiable, open, got opn. Did you mean open?"),
        ({"kind": None}, "kind: required, but not set."),
        ({"weight": 0}, "weight must be positive, got 0"),
        ({"weight": float("inf")}, "weight must be finite, got inf"),
        ({"weight": "much"}, "weight: expected float, got much."),
        ({"data": []}, "data must be a file, a dataset or a list of them, got nothing."),
        ({"columns": {"promt": "text"}}, "columns must be of the roles id, prompt,"),
    ],
)
def test_a_wrong_source_is_named_with_the_key(keys, message, tmp_path):
    said = error_of(tmp_path / "mine.yaml", sources={"sums": SOURCE | keys})
    assert said.startswith(f"{tmp_path / 'mine.yaml'}: sources.sums: ")
    assert message in said
    assert "\n" not in said
