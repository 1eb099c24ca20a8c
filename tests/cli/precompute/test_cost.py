"""What the missing votes will take, without a call."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from judge_server import REPLY_COST
from stored_answers import (
    PRECOMPUTE,
    write_recipe,
)

from lit_grpo.__main__ import main
from lit_grpo.cli.precompute import cost
from lit_grpo.cli.precompute.cost import estimate
from lit_grpo.cli.precompute.votes import VoteCall
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.recipe import Recipe, RecipeSource
from lit_grpo.judge import Judge, Limits, Price

CONTEXT = {"question": "Why?", "reference": None, "rubric": None, "highest": 10}


def scorer(**judge) -> Scorer:
    return Scorer.of(
        Recipe(
            description="",
            sources={"open": RecipeSource(kind="open", data="x")},
            judge=Judge(model="m", temperature=1.0, **judge),
        )
    )


def calls(number: int, *answers: str) -> list[VoteCall]:
    keyed = {str(place): one for place, one in enumerate(answers or ("Because.",))}
    return [VoteCall(context=CONTEXT, vote=vote, answers=keyed) for vote in range(number)]


def test_dollars_and_seconds_follow_from_the_tokens_and_the_limits():
    price = Price(prompt=1.0, completion=10.0)
    one = estimate(calls(1), scorer(price=price))
    limits = Limits(max_concurrency=2)
    found = estimate(calls(4, "Because.", "Why not?"), scorer(price=price, limits=limits))
    assert (found.num_calls, found.num_votes, found.reply_tokens) == (4, 8, 8 * 256)
    assert found.prompt_tokens > 4 * one.prompt_tokens
    assert found.dollars == pytest.approx((found.prompt_tokens + 10 * 8 * 256) / 1e6)
    assert found.seconds == 4 * 2.0 / 2
    limits = Limits(max_concurrency=2, requests_per_minute=6)
    assert estimate(calls(4), scorer(limits=limits)).as_dict()["hours"] == round(40 / 3600, 4)


def test_a_reply_is_taken_to_be_no_longer_than_it_may_be():
    found = estimate(calls(3), scorer(max_completion_tokens=100))
    assert (found.reply_tokens, found.dollars) == (300, None)


def test_of_many_calls_some_stand_for_all(monkeypatch):
    one = estimate(calls(1), scorer()).prompt_tokens
    monkeypatch.setattr(cost, "SAMPLE", 2)
    assert estimate(calls(11), scorer()).prompt_tokens == pytest.approx(11 * one)


def test_without_calls_nothing_is_spent():
    found = estimate([], scorer(price=Price(prompt=1.0, completion=1.0)))
    assert set(found.as_dict().values()) == {0}


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
