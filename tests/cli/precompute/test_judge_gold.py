"""Votes are asked for once, whatever is killed, and recorded when they arrive."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from forked import receive
from judge_server import REPLY_COST, once_together, refuses, writes
from stored_answers import (
    PRECOMPUTE,
    PREPARE,
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
from lit_grpo.cli.precompute.judge_gold import with_share
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.judge import Judge, Limits, Price


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        said = " ".join(capsys.readouterr().out.split())
        assert "US dollars have been spent, and limits.max_cost_usd is" in said
        assert "(all runs on this cache count). Raise judge.limits.max_cost_usd of the" in said
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


def test_processes_share_the_limits_of_a_judge_but_not_that_on_costs():
    limits = Limits(max_concurrency=10, requests_per_minute=60.0, max_cost_usd=5.0)
    judge = Judge(model="m", price=Price(prompt=1.0, completion=1.0), limits=limits)
    shared = with_share(judge, 4).limits
    assert (shared.max_concurrency, shared.requests_per_minute) == (2, 15.0)
    assert (shared.tokens_per_minute, shared.max_cost_usd) == (None, 5.0)
    assert with_share(judge, 20).limits.max_concurrency == 1
