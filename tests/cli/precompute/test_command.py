"""``lit-grpo precompute``: every vote once, whatever is killed, and nothing invented."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from forked import receive
from judge_server import REPLY_COST, JudgeServer, once_together, refuses, writes
from stored_answers import (
    GRADES,
    asked,
    by_last_letter,
    num_recorded,
    said,
    slowly,
    start_command,
    write_recipe,
    write_rows,
)
from worker_processes import is_pending, wait_until

from lit_grpo.__main__ import main
from lit_grpo.cli.prepare.recipe import known_recipes, read_recipe
from lit_grpo.data.prepared import find_prepared

PRECOMPUTE = ("precompute", "--preset", "mine.yaml")
PREPARE = ("prepare", "--preset", "mine.yaml", "--out", "out")


@pytest.fixture
def server(here):
    with JudgeServer(by_last_letter) as server:
        write_rows(20)
        write_recipe(server)
        yield server


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


def test_votes_that_differ_have_a_spread(server):
    grades = iter([2, 4, 9] * 60)
    server.behaviour = lambda request: writes(
        json.dumps({"explanation": "x", "score": next(grades)})
    )
    write_recipe(server, judge={"limits": {"max_concurrency": 1, "num_retries": 0}})
    write_rows(1)
    assert main([*PRECOMPUTE]) == 0
    assert main([*PREPARE]) == 0
    (row,) = find_prepared("out").split("train").rows()
    # One vote of all three answers comes before the next vote.
    assert row.columns["gold_scores"] == pytest.approx([0.2, 0.4, 0.9])
    assert row.columns["gold_spread"] == pytest.approx([0.0] * 3)
    write_rows(2)
    server.behaviour = lambda request: by_last_letter(request)
    assert main([*PRECOMPUTE]) == 0
    assert max(asked(server).values()) == 3


def test_a_killed_run_goes_on_without_asking_what_is_recorded(server):
    server.behaviour = slowly(0.02)
    for number in (20, 60, 100):
        process, _ = start_command(*PRECOMPUTE)
        wait_until(lambda number=number: num_recorded() >= number)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    recorded, before = num_recorded(), len(server.questions)
    assert 100 <= recorded < 180
    # What was on its way at a kill is asked again, at most four calls at each of the three.
    assert before <= recorded + 3 * 4
    assert main([*PRECOMPUTE]) == 0
    assert len(server.questions) - before == 180 - recorded
    assert num_recorded() == 180


def test_several_processes_share_the_calls_and_ask_each_vote_once(server):
    server.behaviour = once_together(server, 3, by_last_letter)  # of two calls each
    started = [start_command(*PRECOMPUTE, "--processes", "2") for _ in range(3)]
    assert [receive(told) for _, told in started] == [0, 0, 0]
    assert set(asked(server).values()) == {3}
    counts = [int(said(process).split()[0]) for process, _ in started]
    assert sum(counts) == 180
    assert sum(count > 0 for count in counts) >= 2
    assert len(list(Path("gold").glob("judge-*/*.jsonl"))) == sum(count > 0 for count in counts)
    for process, _ in started:
        assert "; 0 are missing; 0.0360 US dollars" in said(process)


def test_several_processes_that_are_killed_in_turn_leave_every_vote_once(server):
    server.behaviour = slowly(0.02)
    started = [start_command(*PRECOMPUTE, "--processes", "2") for _ in range(2)]
    for number in (30, 60, 90):
        wait_until(lambda number=number: num_recorded() >= number)
        (killed, _), *others = started
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        started = [*others, start_command(*PRECOMPUTE, "--processes", "2")]
    assert [receive(told) for _, told in started] == [0, 0]
    assert num_recorded() == 180
    # What was on its way at a kill is asked again, at most two calls at each of the three.
    assert 180 <= len(server.questions) <= 180 + 3 * 2
    assert main([*PREPARE]) == 0


def test_a_process_takes_over_what_a_killed_one_had_claimed(server):
    server.behaviour = slowly(30)
    killed, _ = start_command(*PRECOMPUTE, "--limit", "1")
    wait_until(lambda: len(server.questions) == 4)
    server.behaviour = by_last_letter
    other, told = start_command(*PRECOMPUTE, "--limit", "1")
    wait_until(lambda: num_recorded() == 5)  # all but those that the first one is asking for
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert receive(told) == 0
    assert num_recorded() == 9


def test_a_dry_run_needs_neither_network_nor_key_and_says_what_the_run_takes(
    server, capsys, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("connected"))
        patch.delenv("OPENAI_API_KEY", raising=False)
        write_recipe(server, judge={"auth": "key"}, gold={"answers_per_call": 2})
        assert main([*PRECOMPUTE, "--dry_run", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["calls"], plan["votes"]) == (20, 120, 180)
    assert plan["reply_tokens"] == 180 * 256
    assert not server.requests
    assert not Path("gold").exists()
    write_recipe(server, gold={"answers_per_call": 2})
    assert main([*PRECOMPUTE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "rows": 20, "given": 0, "single": 0, "asked": 180, "failures": {}, "left": 0, "stopped": "",
        "dollars": pytest.approx(120 * REPLY_COST), "checked": 0, "unchecked": {},
    }  # fmt: skip
    assert len(server.questions) == plan["calls"]
    characters = sum(len(text) for request in server.questions for text in request.texts)
    assert plan["prompt_tokens"] == pytest.approx(characters / 4, rel=0.05)
    assert main([*PRECOMPUTE, "--dry_run"]) == 0
    header, numbers, *notes = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["rows", "calls", "votes"]
    assert numbers.split() == ["20", "0", "0", "0", "0", "0.00", "0.00"]
    assert notes[0].startswith("estimated: four characters a token, ")


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


def test_copies_of_a_row_are_neither_counted_nor_asked_twice(server, capsys):
    write_rows(2)
    twice = Path("rows.jsonl").read_text() * 2
    Path("rows.jsonl").write_text(twice)
    assert main([*PRECOMPUTE, "--dry_run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["calls"], plan["votes"]) == (4, 18, 18)
    assert main([*PRECOMPUTE]) == 0
    assert capsys.readouterr().out.startswith("18 votes recorded for 4 rows; 0 are missing")
    assert set(asked(server).values()) == {3}


def test_without_a_price_no_cost_is_claimed(server, capsys):
    write_recipe(server, judge={"price": None})
    assert main([*PRECOMPUTE, "--limit", "1", "--dry_run"]) == 0
    assert "unknown: no price" in capsys.readouterr().out
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "9 votes recorded for 1 rows; 0 are missing"


def test_another_address_or_number_of_votes_is_the_same_judge(server):
    assert main([*PRECOMPUTE, "--limit", "1"]) == 0
    with JudgeServer(by_last_letter) as moved:
        write_recipe(moved, gold={"num_evals": 4})
        assert main([*PRECOMPUTE, "--limit", "1"]) == 0
        assert len(moved.questions) == 3


def test_a_failure_is_no_score_and_is_asked_again(server, capsys):
    def fails_on_b(request):
        (one,) = request.of("answer")
        return writes("hm") if one.text.endswith("b") else by_last_letter(request)

    server.behaviour = fails_on_b
    assert main([*PRECOMPUTE]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("120 votes recorded for 20 rows; 60 are missing; 0.0360 US dollars")
    assert lines[1].startswith("60 failed: parse_error: the reply has no JSON object with ")
    assert lines[2:] == ["next: lit-grpo precompute --preset mine.yaml"]
    assert main([*PREPARE]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: 20 of 20 rows have no gold scores: open:")
    assert "Score them by lit-grpo precompute --preset mine.yaml; or" in message
    server.behaviour = by_last_letter
    before = len(server.questions)
    assert main([*PRECOMPUTE]) == 0
    assert len(server.questions) - before == 60
    assert main([*PREPARE]) == 0


def test_a_judge_that_never_answers_is_not_asked_about_everything(server, capsys):
    server.behaviour = lambda request: refuses(503)
    write_recipe(server, judge={"limits": {"max_concurrency": 1, "num_retries": 0}})
    assert main([*PRECOMPUTE]) == 4
    said = capsys.readouterr().out
    assert "0 votes recorded for 20 rows; 180 are missing" in said
    assert "stopped: none of the first 20 votes arrived" in said
    assert len(server.questions) == 20
    assert num_recorded() == 0


def test_the_budget_counts_what_earlier_runs_and_failures_have_spent(server, capsys):
    limits = {"max_concurrency": 1, "num_retries": 0}
    server.behaviour = lambda request: writes("hm")
    write_recipe(server, judge={"limits": limits | {"max_cost_usd": 10 * REPLY_COST}})
    assert main([*PRECOMPUTE]) == 4
    spent = len(server.questions)
    assert spent in (9, 10)  # the test question costs as much as a vote
    server.behaviour = by_last_letter
    for _ in range(2):
        assert main([*PRECOMPUTE]) == 4
        assert "stopped: this process has spent 0.00" in capsys.readouterr().out
    assert len(server.questions) <= spent + 1
    write_recipe(server, judge={"limits": limits | {"max_cost_usd": 30 * REPLY_COST}})
    assert main([*PRECOMPUTE]) == 4
    assert 29 <= len(server.questions) <= 30
    assert main([*PRECOMPUTE, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "limits.max_cost_usd is 0.006: it would stop before the end" in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_waits_for_the_replies_that_are_on_their_way(number, code, server):
    server.behaviour = once_together(server, 4, slowly(0.3))
    process, told = start_command(*PRECOMPUTE)
    wait_until(lambda: len(server.questions) == 4)
    os.kill(process.pid, number)
    assert receive(told) == code
    assert num_recorded() == len(server.questions) == 4
    assert f"stopped: {number.name} stopped it" in said(process)
    assert "next: lit-grpo precompute --preset mine.yaml" in said(process)


def test_a_second_signal_does_not_wait(server):
    server.behaviour = slowly(60)
    process, told = start_command(*PRECOMPUTE)
    wait_until(lambda: len(server.questions) == 4)
    os.kill(process.pid, signal.SIGINT)
    wait_until(lambda: not is_pending(process.pid, signal.SIGINT))  # two at once would be one
    os.kill(process.pid, signal.SIGINT)
    assert receive(told, 30) == 130
    assert num_recorded() == 0


def test_access_that_is_denied_is_an_error_before_any_question(server, capsys):
    server.script(refuses(401))
    assert main([*PRECOMPUTE]) == 2
    assert "error: the judge did not accept a test question" in capsys.readouterr().err
    assert len(server.requests) == 1


def test_rows_with_scores_or_without_two_answers_are_not_asked(server, capsys):
    rows = [
        {"question": "Why?", "answers": ["a", "b"], "gold_scores": [1, 0]},
        {"question": "How?", "answers": ["a"]},
        {"question": "What?", "answers": []},
        {"question": "Who?"},
        {"question": "When?", "answers": ["a", "c"]},
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([*PRECOMPUTE]) == 0
    assert asked(server) == {"a": 3, "c": 3}
    out = capsys.readouterr().out
    assert "3 rows have fewer than two answers and cannot be compared" in out
    assert main([*PREPARE]) == 2
    assert "3 of 5 rows have no gold scores" in capsys.readouterr().err
    assert main([*PREPARE, "--only_cached"]) == 0
    assert len(find_prepared("out").split("train").rows()) == 2


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


def test_data_that_have_all_their_scores_are_said_to_lack_nothing(server, capsys):
    rows = [
        {"question": f"Describe hill {n}.", "answers": ["a", "b"], "gold_scores": [1, 0]}
        for n in range(3)
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main([*PREPARE]) == 0
    capsys.readouterr()
    given = "3 rows have gold scores in the data: nothing is missing for them\n"
    words = [*PRECOMPUTE, "--prepared", "out", "--cache", "absent"]
    assert main([*words, "--dry_run"]) == 0
    assert capsys.readouterr().out == given
    assert main(words) == 0
    shown, _, advised = capsys.readouterr().out.partition("next: lit-grpo ")
    assert shown == given
    assert main(advised.split()) == 0


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
