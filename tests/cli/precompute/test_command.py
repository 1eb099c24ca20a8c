"""``lit-grpo precompute``: every vote once, whatever is killed, and nothing invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judge_server import JudgeServer, refuses
from stored_answers import (
    GRADES,
    PRECOMPUTE,
    PREPARE,
    asked,
    by_last_letter,
    slowly,
    write_recipe,
)

from lit_grpo.__main__ import main
from lit_grpo.cli.prepare.recipe import known_recipes, read_recipe
from lit_grpo.data.rows.prepared import find_prepared


def test_every_answer_gets_its_votes_and_prepare_joins_their_mean_and_spread(server, capsys):
    server.behaviour = slowly(0)
    assert main([*PRECOMPUTE]) == 0
    said = capsys.readouterr()
    assert said.out == (
        "180 votes recorded for 20 rows; 0 are missing; 0.0360 US dollars spent in all\n"
        "next: lit-grpo prepare --preset mine.yaml --out prepared\n"
    )
    assert set(asked(server).values()) == {3}
    assert main([*PREPARE, "--cache", "gold"]) == 0
    rows = find_prepared("out").split("train").rows()
    assert len(rows) == 20
    for row in rows:
        assert row.columns["gold_scores"] == pytest.approx([one / 10 for one in GRADES.values()])
        assert row.columns["gold_spread"] == [0.0] * 3
    manifest = json.loads(Path("out/manifest.json").read_text())
    (directory,) = Path("gold").glob("judge-*")
    fingerprint = directory.name.removeprefix("judge-")
    about = {"judge": "m", "template": "grade", "fingerprint": fingerprint}
    assert manifest["gold"] == {"num_evals": 3, "highest": 10, **about}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"judge": {"model": "n"}}, "model m, not n"),
        ({"judge": {"temperature": None}}, "temperature 1.0, not null"),
        ({"gold": {"template": "other.jinja"}}, "another text of the template"),
        ({"gold": {"highest": 20, "show_reference": False}}, "highest 10, not 20, show_referenc"),
    ],
)
def test_the_scores_of_another_judge_are_refused_with_what_differs(
    changes, difference, server, capsys
):
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    (theirs,) = Path("gold").glob("judge-*")
    shipped = Path(__file__).parents[3] / "lit_grpo/judge/templates/grade.jinja"
    Path("other.jinja").write_text(shipped.read_text() + "\n")
    write_recipe(server, **changes)
    capsys.readouterr()
    for command in (PRECOMPUTE, (*PRECOMPUTE, "--dry_run"), PREPARE):
        assert main([*command]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: gold must have the scores of the judge of this recipe (")
        assert f"got those of another: {theirs.name} ({difference}" in error
        assert "Choose another --cache, or set judge and gold of the recipe as they were." in error
    assert main([*PRECOMPUTE, "--limit", "1", "--cache", "gold2"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 503])
def test_a_judge_that_gave_no_vote_does_not_claim_the_cache(status, server, capsys):
    server.behaviour = lambda request: refuses(status)
    assert main([*PRECOMPUTE]) != 0
    (nobody,) = Path("gold").glob("judge-*")
    server.behaviour = by_last_letter
    write_recipe(server, judge={"model": "n"})
    assert main([*PRECOMPUTE]) == 0
    assert main([*PREPARE]) == 0
    (other,) = {*Path("gold").glob("judge-*")} - {nobody}
    write_recipe(server)  # nor does its directory give it a right to the cache of the other
    capsys.readouterr()
    assert main([*PRECOMPUTE]) == 2
    assert f"got those of another: {other.name} (model n, not m)" in capsys.readouterr().err


def test_another_address_or_number_of_votes_is_the_same_judge(server):
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    with JudgeServer(by_last_letter) as moved:
        write_recipe(moved, gold={"num_evals": 4})
        assert main([*PRECOMPUTE, "--limit", "1"]) == 0
        assert len(moved.questions) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"judge": {"temperature": 0.0}},
            "error: gold.num_evals must be 1 with a temperature of",
        ),
        ({"gold": {"template": "none.jinja"}}, "error: template must be a file or a bundled templ"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_code_2(changes, message, server, capsys):
    write_recipe(server, **changes)
    assert main([*PRECOMPUTE]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not server.requests


def test_a_recipe_without_a_judge_says_what_to_set(server, capsys):
    write_recipe(server)
    recipe = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(recipe.replace("judge:", "judge: null\nx:"))
    text = "description: x\nsources: {open: {kind: open, data: rows.jsonl}}\n"
    Path("mine.yaml").write_text(text)
    assert main([*PRECOMPUTE]) == 2
    assert "need a judge, and the recipe has none. Set judge in the r" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_that_ships_is_scored_and_prepared_from_what_is_cached(
    name, server, capsys, monkeypatch
):
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.url)
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "x")
    sums = [{"question": f"1 + {n}?", "answer": f"So #### {n + 1}"} for n in range(8)]
    hills = [
        {"instruction": f"Hill {n}?", "completions": [{"response": f"{n}{x}"} for x in "ac"]}
        for n in range(8)
    ]
    files = {"verifiable": sums, "open": hills}
    words = ["--preset", name]
    for source in read_recipe(name).sources:
        rows = "".join(f"{json.dumps(row)}\n" for row in files[source])
        Path(f"{source}.jsonl").write_text(rows)
        words += ["--data", f"{source}={source}.jsonl"]
    assert main(["precompute", *words, "--limit", "5", "--dry_run"]) == 0
    assert main(["precompute", *words, "--limit", "5"]) == 0
    shown = capsys.readouterr().out
    assert ("5 verifiable rows got gold by a program" in shown) == ("verifiable=" in str(words))
    sizes = ["--holdout_size", "0", "--validation_size", "0"]
    assert main(["prepare", *words, *sizes, "--only_cached", "--out", "out"]) == 0
    rows = [row.columns for row in find_prepared("out").split("train").rows()]
    assert len(rows) == 5 * (len(words) // 2 - 1)
    for row in rows:
        expected = [1.0, 0.0, 0.0, 0.0] if row["source"] == "verifiable" else [0.9, 0.1]
        assert row["gold_scores"] == pytest.approx(expected)
        assert len(row["answers"]) == len(row["gold_spread"]) == len(expected)


def test_prepared_rows_are_scored_for_the_next_preparation(server, capsys):
    source = {"kind": "open", "data": "rows.jsonl", "where": {"prompt_characters": [1, 16]}}
    write_recipe(server, sources={"open": source | {"scored": False}}, holdout_size=2)
    assert main([*PREPARE]) == 0
    assert main([*PRECOMPUTE]) == 0
    assert not server.questions
    assert main([*PRECOMPUTE, "--prepared", "out"]) == 0
    assert len(server.questions) == 10 * 9
    write_recipe(server, sources={"open": source}, holdout_size=2)
    assert main([*PREPARE]) == 0
    rows = find_prepared("out").split("train").rows()
    assert [len(row.columns["gold_scores"]) for row in rows] == [3] * 8
    assert main([*PRECOMPUTE, "--prepared", "nothing"]) == 2
    assert "error: prepared must be a directory that lit-grpo prep" in capsys.readouterr().err
    write_recipe(server, sources={"other": source})
    assert main([*PRECOMPUTE, "--prepared", "out"]) == 2
    assert "must have the sources of the recipe, got another, 'open'" in capsys.readouterr().err


def test_a_cache_or_out_that_cannot_be_written_names_its_option_before_the_work(server, capsys):
    Path("file").write_text("")
    assert main([*PRECOMPUTE, "--cache", "file"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cache must be a place that can be written, got file (")
    assert said.endswith("File exists). Set --cache.\n")
    assert not server.requests
    assert main(["prepare", "--preset", "mine.yaml", "--out", "/proc/x"]) == 2
    assert "error: out must be a place that can be written, got /proc" in capsys.readouterr().err


def test_rows_that_need_gold_and_get_none_by_program_are_absent(server, capsys):
    rows = [{"question": f"1 + {n}?", "answer": str(n + 1)} for n in range(3)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    # It takes 2 for wrong, whatever the question is.
    pattern = {"pattern": r"answer is [13]\.", "mode": "search"}
    verifier = {"class_path": "FormatReward", "init_args": pattern}
    source = {"kind": "verifiable", "data": "rows.jsonl", "scored": True, "verifier": verifier}
    write_recipe(server, sources={"sums": source}, judge={"temperature": 0.0})
    assert main([*PRECOMPUTE]) == 4
    shown = capsys.readouterr().out
    assert shown.startswith(
        "2 verifiable rows got gold by a program\n"
        "1 got none: right and wrong answers get the same value (sums:"
    )
    assert shown.endswith(
        "next: repair or remove the rows without gold scores, or leave them out by "
        "lit-grpo prepare --preset mine.yaml --out prepared --only_cached\n"
    )
    assert main([*PREPARE]) == 2
    refusal = capsys.readouterr().err
    assert "1 of 3 rows have no gold scores: sums:" in refusal
    assert "(the recipe says that its rows are scored). Score them by lit-grpo pre" in refusal
    assert "or repair the verifiable ones for which that has found no gold; or" in refusal
    assert main([*PREPARE, "--only_cached"]) == 0
    assert not server.requests


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1 + 1?", "answer": "2"},
        {"question": "Why?", "answers": ["Because."]},
    ],
)
def test_no_command_is_advised_that_would_refuse_a_source_without_gold(server, capsys, row):
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n")
    kind = "verifiable" if "answer" in row else "open"
    verifier = {"class_path": "FormatReward", "init_args": {"pattern": "x"}}
    source = {"kind": kind, "data": "rows.jsonl", "scored": True, "verifier": verifier}
    write_recipe(server, sources={"mine": source})
    main([*PRECOMPUTE])
    assert capsys.readouterr().out.endswith(
        "next: repair or remove the rows without gold scores, since a source has no others\n"
    )


def test_rows_with_one_answer_may_be_left_out_by_the_command_that_is_advised(server, capsys):
    rows = Path("rows.jsonl")
    rows.write_text(rows.read_text() + '{"question": "Why?", "answers": ["Because."]}\n')
    assert main([*PRECOMPUTE]) == 0
    advised = capsys.readouterr().out.strip().rpartition("leave them out by lit-grpo ")[2]
    assert advised == "prepare --preset mine.yaml --out prepared --only_cached"
    assert main(advised.split()) == 0


def test_a_damaged_line_of_the_cache_is_named_and_nothing_is_asked(server, capsys):
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    (path,) = Path("gold").glob("judge-*/*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"s":9', b'"s":8', 1))
    before = len(server.requests)
    for command in (PRECOMPUTE, PREPARE):
        assert main([*command]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}, line ")
        assert error.endswith("Remove the line; what it had is asked again.\n")
    assert len(server.requests) == before
