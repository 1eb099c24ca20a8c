"""Tables of recipes, and of what became of the rows."""

from __future__ import annotations

import pytest
import yaml
from rich.console import Console

from lit_grpo.__main__ import main
from lit_grpo.cli.prepare.tables import copies_in_words, print_manifest


def test_the_list_has_every_source_of_every_recipe(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS")
    assert main(["prepare", "--list"]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["recipe", "source", "kind", "share", "data", "rows"]
    gsm8k = ["openai/gsm8k:main:train", "all"]
    ultra = ["openbmb/UltraFeedback:train[:8000]", *["num_answers", "at", "least", "2"]]
    assert lines[:6] == [
        ["curriculum", "verifiable", "verifiable", "50%", *gsm8k],
        ["open", "open", "50%", *ultra],
        ["full_mix", "verifiable", "verifiable", "50%", *gsm8k],
        ["open", "open", "50%", *ultra],
        ["open_only", "open", "open", "100%", *ultra],
        ["verifiable_only", "verifiable", "verifiable", "100%", *gsm8k],
    ]
    described = {words[0]: " ".join(words[1:]) for words in lines[6:]}
    assert described["open_only:"].startswith("open questions")
    assert described["curriculum:"].endswith("phases 0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3")
    assert len(described) == 4


def test_nothing_is_cut_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["prepare", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert max(map(len, shown.splitlines()[:10])) <= 80


def test_the_list_has_the_recipes_of_the_working_directory_with_their_filters(here, capsys):
    where = {
        "prompt_characters": [1, 400],
        "num_answers": [None, 4],
        "language": ["en", "de"],
        "checked": True,
    }
    source = {"kind": "open", "data": ["a.jsonl", "b.csv"], "where": where}
    recipe = {"description": "mine", "sources": {"essays": source}}
    (here / "configs/data").mkdir(parents=True)
    (here / "configs/data/mine.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        assert main(["prepare", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "a.jsonl, b.csv" in shown
    for words in (
        "prompt_characters from 1 to 400",
        "num_answers at most 4",
        "language one of en, de",
        "checked True",
        "\nmine: mine\n",
    ):
        assert words in shown


def test_copies_are_said_with_the_splits_that_they_are_in():
    copies = {
        "exact": {"train": 1, "dropped": 1200},
        "near": {"train and holdout": 2},
    }
    assert [*copies_in_words(copies)] == [
        "1 exact duplicate, within train",
        "1,200 exact duplicates, of dropped rows",
        "2 near duplicates, between train and holdout",
    ]


@pytest.mark.parametrize(("held_out", "is_told"), [(4, False), (6, True), (10, False)])
def test_a_source_that_keeps_few_rows_to_train_on_is_named(held_out, is_told, capsys):
    by_source = {"train": {"sums": 90, "chat": 10 - held_out}, "holdout": {"chat": held_out}}
    manifest = {
        "splits": {name: {"by_source": one} for name, one in by_source.items()},
        "sources": {name: {"read": 90, "kept": 90, "dropped": {}} for name in ("sums", "chat")},
        "duplicates": {},
        "sft": False,
    }
    print_manifest(manifest, Console(width=200))
    told = "chat keeps 4 of 10 rows to train on" in capsys.readouterr().out
    assert told == is_told
