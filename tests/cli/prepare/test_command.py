"""``lit-grpo prepare``: what each recipe is made of."""

from __future__ import annotations

import pytest
import yaml

from lit_grpo.__main__ import main


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the following arguments are required: --list. See lit-grpo prepare --help.\n"),
        (["--lst"], "error: the following arguments are required: --list."),
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
