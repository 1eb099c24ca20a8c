import asyncio
import gc
import re

import pytest
from judge_server import (
    PRICE,
    QUESTION,
    REPLY_COST,
    JudgeServer,
    ask,
    ask_with_books,
    hurry,
    refuses,
    says,
)

from lit_grpo.judge import Judge, JudgeFailure, Limits
from lit_grpo.judge.budget import CallBudget, Grant, _Window, budget_of, release
from lit_grpo.judge.client import JudgeClient
from lit_grpo.types import Outcome


@pytest.fixture
def server():
    with JudgeServer() as one:
        yield one


def one_question_each(judges):
    """What each judge answers to one question, all asked side by side in this order."""

    async def run():
        clients = [JudgeClient(one) for one in judges]
        asked = (one.ask(QUESTION) for one in clients)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for one in clients:
            await one.close()
        return answers

    return asyncio.run(run())


# Within a minute


def admit(window, amount, now):
    """When the amount is let in, by a clock that the test holds."""
    now += window.seconds_until(amount, now)
    assert window.seconds_until(amount, now) == 0
    window.entries.append([now, amount])
    return now


def test_no_60_seconds_hold_more_calls_than_allowed():
    window = _Window(3)
    moments = []
    for asked_at in (0, 1, 2, 2, 30, 61.5, 61.5, 61.5, 200):
        moments.append(admit(window, 1, max([asked_at, *moments])))
    assert moments == [0, 1, 2, 60, 61, 62, 120, 121, 200]
    for moment in moments:
        assert sum(moment <= other < moment + 60 for other in moments) <= 3


def test_tokens_wait_until_enough_of_those_before_are_over():
    window = _Window(100)
    assert admit(window, 60, 0) == 0
    assert admit(window, 30, 10) == 10
    assert admit(window, 20, 20) == 60
    assert admit(window, 50, 61) == 61
    assert admit(window, 70, 62) == 121


def test_what_is_larger_than_the_limit_gets_a_minute_of_its_own():
    window = _Window(100)
    assert admit(window, 500, 0) == 0
    assert admit(window, 1, 1) == 60
    assert admit(window, 500, 61) == 120


def test_a_call_counts_with_the_tokens_that_it_took():
    budget = CallBudget(Limits(tokens_per_minute=100))
    grant = Grant()
    assert budget._admit(grant, 90) is None
    assert budget._admit(Grant(), 50)[0] == "tokens_per_minute"
    grant.settle(10)
    assert budget._admit(Grant(), 50) is None


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"requests_per_minute": 2}, "requests_per_minute"),
        ({"tokens_per_minute": 20}, "tokens_per_minute"),
    ],
)
def test_the_setting_that_holds_a_call_up_is_named(limits, cause):
    budget = CallBudget(Limits(**limits))
    assert [budget._admit(Grant(), 10) for _ in range(2)] == [None, None]
    named, seconds = budget._admit(Grant(), 10)
    assert named == cause
    assert 55 < seconds <= 60


def test_a_request_beyond_the_minute_is_never_sent(server):
    limits = {"requests_per_minute": 3, "deadline_seconds": 2.0}
    answers = ask(server.judge(limits=limits), *[QUESTION] * 5)
    outcomes = [getattr(one, "outcome", Outcome.OK) for one in answers]
    assert outcomes == [Outcome.OK] * 3 + [Outcome.RATE_LIMITED] * 2
    assert all("waiting for requests_per_minute" in str(one) for one in answers[3:])
    assert len(server.requests) == 3


def test_tokens_beyond_the_minute_are_never_sent(server):
    # A question is expected to take about 259 tokens, and is known to have taken 110 afterwards.
    limits = {"tokens_per_minute": 400, "deadline_seconds": 2.0, "max_concurrency": 1}
    answers = ask(server.judge(limits=limits), *[QUESTION] * 5)
    assert len(server.requests) == 2
    told = sorted(str(one).split(" went into ")[1] for one in answers[2:])
    assert told == ["waiting for max_concurrency"] * 2 + ["waiting for tokens_per_minute"]


# Out of time before the call may begin


@pytest.mark.parametrize(
    ("waited", "outcome", "told"),
    [
        ({"max_concurrency": 2.0}, Outcome.TIMEOUT, "2.0 s went into waiting for max_concurrency"),
        (
            {"max_concurrency": 1.0, "requests_per_minute": 7.26},
            Outcome.RATE_LIMITED,
            "7.3 s went into waiting for requests_per_minute",
        ),
        (
            {"max_concurrency": 3.0, "requests_per_minute": 1.0, "tokens_per_minute": 4.0},
            Outcome.RATE_LIMITED,
            "4.0 s went into waiting for tokens_per_minute",
        ),
        (
            {"retry_after": 5.0, "tokens_per_minute": 4.0},
            Outcome.RATE_LIMITED,
            "5.0 s went into waiting for retry_after",
        ),
        (
            {"max_concurrency": 9.0, "retry_after": 5.0},
            Outcome.TIMEOUT,
            "9.0 s went into waiting for max_concurrency",
        ),
    ],
)
def test_what_was_waited_for_longest_is_to_blame(waited, outcome, told):
    failure = Grant(waited=waited).explain()
    assert failure.outcome is outcome
    assert failure.detail == f"no call within limits.deadline_seconds: {told}"
    assert not failure.may_pass


def blamed(failure):
    """The cause that a failure names, once its seconds are seen to be about the deadline of 2."""
    told = re.fullmatch(
        r"no call within limits\.deadline_seconds: ([\d.]+) s went into waiting for (\w+)",
        failure.detail,
    )
    assert 1.5 < float(told[1]) < 15
    return told[2]


@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 150}])
def test_a_question_that_the_minute_never_had_room_for_is_rate_limited(server, limits):
    judge = server.judge(limits=limits | {"deadline_seconds": 2.0}, price=PRICE)
    (answer, failure), totals = ask_with_books(judge, QUESTION, QUESTION)
    assert answer.verdicts["X"]["score"] == 10
    assert failure.outcome is Outcome.RATE_LIMITED
    assert [blamed(failure)] == list(limits)
    assert failure.cost == 0
    assert len(server.requests) == totals["judge/calls"] == 1
    assert totals["judge/rate_limited"] == totals["judge/retries"] == 0


def test_a_question_that_never_had_a_slot_is_timed_out(server):
    server.behaviour = lambda request: says(score=10, seconds=5)
    judges = [server.judge(limits={"max_concurrency": 1, "deadline_seconds": s}) for s in (60, 2.0)]
    answer, failure = one_question_each(judges)
    assert answer.verdicts["X"]["score"] == 10
    assert failure.outcome is Outcome.TIMEOUT
    assert blamed(failure) == "max_concurrency"
    assert len(server.requests) == 1


def test_a_question_that_a_server_s_wish_to_wait_held_up_says_so(server):
    server.behaviour = lambda request: refuses(429, retry_after="3000")
    limits = {"max_concurrency": 1, "deadline_seconds": 2.0}
    (refused, held), totals = ask_with_books(server.judge(limits=limits), QUESTION, QUESTION)
    assert refused.outcome is held.outcome is Outcome.RATE_LIMITED
    assert refused.status == 429
    assert blamed(held) == "retry_after"
    assert len(server.requests) == totals["judge/rate_limited"] == 1


def test_a_call_that_began_and_was_too_late_is_no_matter_of_waiting(server):
    server.behaviour = lambda request: says(score=10, seconds=30)
    (failure,) = ask(server.judge(limits={"deadline_seconds": 0.5}))
    assert failure.outcome is Outcome.TIMEOUT
    assert "waiting for" not in failure.detail


# At a time


@pytest.mark.parametrize("most", [1, 3])
def test_the_server_never_sees_more_calls_at_once_than_allowed(server, most):
    server.behaviour = lambda request: says(score=10, seconds=0.1)
    answers = ask(server.judge(limits={"max_concurrency": most}), *[QUESTION] * 10)
    assert not any(isinstance(one, BaseException) for one in answers)
    assert server.most_at_once == most
    assert len(server.requests) == 10


def test_a_slot_comes_back_after_every_kind_of_end(server, monkeypatch):
    hurry(monkeypatch)
    limits = {"max_concurrency": 1, "call_timeout_seconds": 0.3, "num_retries": 0}
    server.script(refuses(500), refuses(400), says(score=1, seconds=5), says(score="bad"))

    async def run():
        client = JudgeClient(server.judge(limits=limits))
        asked = [client.ask(QUESTION) for _ in range(4)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
        cancelled = asyncio.create_task(client.ask(QUESTION))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        last = await client.ask(QUESTION)
        await client.close()
        return ended, last

    ended, last = asyncio.run(run())
    assert all(isinstance(one, JudgeFailure) for one in ended)
    assert last.verdicts["X"]["score"] == 10


def test_calls_that_a_server_asks_to_hold_off_are_held_all_together(server):
    server.script(refuses(429, retry_after="1"))

    async def run():
        client = JudgeClient(server.judge(limits={"max_concurrency": 1}))
        await asyncio.gather(*(client.ask(QUESTION) for _ in range(3)))
        waited = client.ledger.read().totals["timing/judge_wait_retry_after_s"]
        await client.close()
        return waited

    assert asyncio.run(run()) > 0.5
    times = [request.time for request in server.requests]
    assert len(times) == 4
    assert min(times[1:]) - times[0] >= 1.0


# Among processes


def test_the_limits_of_a_job_are_divided_among_its_processes():
    limits = Limits(max_concurrency=10, requests_per_minute=40, tokens_per_minute=4000)
    budgets = [CallBudget(limits, rank, 4) for rank in range(4)]
    assert [budget._concurrency for budget in budgets] == [3, 3, 2, 2]
    for budget in budgets:
        calls = 0
        while budget._admit(Grant(), 10) is None:
            calls += 1
        assert calls == 10


@pytest.mark.parametrize("name", ["max_concurrency", "requests_per_minute"])
def test_fewer_calls_than_processes_are_refused(name):
    with pytest.raises(ValueError, match=f"limits.{name} must be at least the 4 processes"):
        CallBudget(Limits(**{name: 3}), 0, 4)


def test_each_process_has_its_share_of_the_money():
    budget = CallBudget(Limits(max_cost_usd=4), 0, 4)
    budget.spend(0.99)
    assert budget._admit(Grant(), 1) is None
    budget.spend(0.01)
    with pytest.raises(JudgeFailure) as caught:
        budget._admit(Grant(), 1)
    assert caught.value.outcome is Outcome.BUDGET_SPENT


def test_a_resumed_job_goes_on_from_what_it_had_spent_once():
    budget = CallBudget(Limits(max_cost_usd=4), 0, 2)
    for _ in range(2):
        budget.resume(3.0)
    assert budget.spent_usd == 1.5
    budget.spend(0.5)
    with pytest.raises(JudgeFailure):
        budget._admit(Grant(), 1)


# Among rewards


def test_two_clients_of_one_deployment_share_its_limits(server):
    server.behaviour = lambda request: says(score=10, seconds=0.05)
    judge = server.judge(limits={"max_concurrency": 2, "max_cost_usd": 1}, price=PRICE)

    async def run():
        clients = JudgeClient(judge), JudgeClient(judge)
        await asyncio.gather(*(one.ask(QUESTION) for one in clients for _ in range(5)))
        spent = [one.budget.spent_usd for one in clients]
        for one in clients:
            await one.close()
        return spent

    assert asyncio.run(run()) == pytest.approx([10 * REPLY_COST] * 2)
    assert server.most_at_once == 2


def judge(**settings):
    given = {"model": "m", "base_url": "http://127.0.0.1:9", "auth": "none"}
    return Judge(**(given | settings))


def test_two_rewards_must_give_one_deployment_the_same_limits():
    first = budget_of(judge(limits=Limits(max_concurrency=2)))
    with pytest.raises(ValueError, match="must give it the same limits"):
        budget_of(judge(limits=Limits(max_concurrency=3)))
    other = budget_of(judge(model="other", limits=Limits(max_concurrency=3)))
    assert other is not first
    release(first)
    release(other)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_concurrency": 3},
        {"requests_per_minute": 30.0},
        {"tokens_per_minute": 3000.0},
        {"max_cost_usd": 3.0},
    ],
)
def test_each_limit_of_the_deployment_itself_must_be_the_same(limits):
    own = {"call_timeout_seconds": 5.0, "deadline_seconds": 50.0, "num_retries": 0}
    first = budget_of(judge(price=PRICE))
    (name,) = limits
    with pytest.raises(ValueError, match=f"'{name}': {limits[name]}") as caught:
        budget_of(judge(price=PRICE, limits=Limits(**limits)))
    assert not any(each in str(caught.value) for each in own)
    # How patient a reward is with its questions is its own affair.
    assert budget_of(judge(price=PRICE, limits=Limits(**own))) is first
    release(first)
    release(first)


def test_each_client_of_a_deployment_keeps_its_own_patience(server):
    server.behaviour = lambda request: says(score=10, seconds=1.0)
    judges = [server.judge(limits={"call_timeout_seconds": s, "num_retries": 0}) for s in (0.2, 20)]
    hasty, patient = one_question_each(judges)
    assert hasty.outcome is Outcome.TIMEOUT
    assert patient.verdicts["X"]["score"] == 10


def test_a_budget_is_forgotten_when_its_last_client_is_closed():
    gc.disable()
    first, same = budget_of(judge()), budget_of(judge())
    assert first is same
    release(first)
    assert budget_of(judge()) is first
    release(first)
    release(first)
    fresh = budget_of(judge(limits=Limits(max_concurrency=1)))
    assert fresh is not first
    release(fresh)
    gc.enable()
