import asyncio
import re
import threading
from functools import partial

import pytest
from judge_server import (
    PRICE,
    QUESTION,
    REPLY_COST,
    ask,
    once_together,
    refuses,
    says,
)

from lit_grpo.diagnostics.waits import describe_wait
from lit_grpo.judge import Judge, Limits
from lit_grpo.judge.budget import CallBudget, CallPermit, _Window, budget_of, release
from lit_grpo.judge.client import JudgeClient
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome

# Requests and tokens per minute


def admit(window, amount, now):
    """Return when the window admits the amount, on a simulated clock."""
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


def test_tokens_wait_until_enough_earlier_ones_have_expired():
    window = _Window(100)
    assert admit(window, 60, 0) == 0
    assert admit(window, 30, 10) == 10
    assert admit(window, 20, 20) == 60
    assert admit(window, 50, 61) == 61
    assert admit(window, 70, 62) == 121


def test_an_amount_above_the_limit_waits_for_an_empty_window():
    window = _Window(100)
    assert admit(window, 500, 0) == 0
    assert admit(window, 1, 1) == 60
    assert admit(window, 500, 61) == 120


def test_a_call_counts_with_the_tokens_that_it_used():
    budget = CallBudget(Limits(tokens_per_minute=100))
    permit = CallPermit()
    assert budget._admit(permit, 90) is None
    assert budget._admit(CallPermit(), 50)[0] == "tokens_per_minute"
    permit.settle(10)
    assert budget._admit(CallPermit(), 50) is None


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"requests_per_minute": 2}, "requests_per_minute"),
        ({"tokens_per_minute": 20}, "tokens_per_minute"),
    ],
)
def test_the_setting_that_delays_a_call_is_named(limits, cause):
    budget = CallBudget(Limits(**limits))
    assert [budget._admit(CallPermit(), 10) for _ in range(2)] == [None, None]
    named, seconds = budget._admit(CallPermit(), 10)
    assert named == cause
    assert 55 < seconds <= 60


def test_tokens_above_the_limit_are_never_sent(server):
    # A question is estimated at about 259 tokens and turns out to use 110.
    limits = {"tokens_per_minute": 400, "max_concurrency": 1}
    answers, late, _ = ask_then_in_a_hurry(server, 2, 3, limits=limits)
    assert not any(isinstance(one, BaseException) for one in answers)
    assert len(server.requests) == 2
    assert list(map(blamed, late)) == ["tokens_per_minute"] * 3


def ask_then_in_a_hurry(server, num_first, num_late, *, limits, **settings):
    """Ask some questions, and then others that have only a second to start.

    Return the answers of both and the totals of all calls.
    """

    async def run():
        patient, hasty = (
            JudgeClient(server.judge(limits=limits | {"deadline_seconds": seconds}, **settings))
            for seconds in (60, 1.0)
        )
        found = []
        for client, number in ((patient, num_first), (hasty, num_late)):
            asked = (client.ask(QUESTION) for _ in range(number))
            found.append(await asyncio.gather(*asked, return_exceptions=True))
        first, late = (client.ledger.read().totals for client in (patient, hasty))
        for client in (patient, hasty):
            await client.close()
        return *found, {name: late[name] + first.get(name, 0) for name in late}

    return asyncio.run(run())


# Deadlines that pass before the call may start


@pytest.mark.parametrize(
    ("waited", "outcome", "detail"),
    [
        ({"max_concurrency": 2.0}, Outcome.TIMEOUT, "2.0 s for max_concurrency"),
        (
            {"max_concurrency": 1.0, "requests_per_minute": 7.26},
            Outcome.RATE_LIMITED,
            "7.3 s for requests_per_minute",
        ),
        (
            {"max_concurrency": 3.0, "requests_per_minute": 1.0, "tokens_per_minute": 4.0},
            Outcome.RATE_LIMITED,
            "4.0 s for tokens_per_minute",
        ),
        (
            {"retry_after": 5.0, "tokens_per_minute": 4.0},
            Outcome.RATE_LIMITED,
            "5.0 s for retry_after",
        ),
        (
            {"max_concurrency": 9.0, "retry_after": 5.0},
            Outcome.TIMEOUT,
            "9.0 s for max_concurrency",
        ),
    ],
)
def test_the_longest_wait_is_the_cause(waited, outcome, detail):
    failure = CallPermit(waited=waited).explain()
    assert failure.outcome is outcome
    assert (
        failure.detail
        == f"the call did not start within limits.deadline_seconds: it waited {detail}"
    )
    assert not failure.is_transient


def blamed(failure):
    """Return the cause that a failure names, after a check of its seconds."""
    match = re.fullmatch(
        r"the call did not start within limits\.deadline_seconds: it waited ([\d.]+) s for (\w+)",
        failure.detail,
    )
    assert 0.3 < float(match[1]) < 15
    return match[2]


@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 150}])
def test_a_question_beyond_the_rate_is_rate_limited_and_never_sent(server, limits):
    (answer,), (failure,), totals = ask_then_in_a_hurry(server, 1, 1, limits=limits, price=PRICE)
    assert answer.verdicts["X"]["score"] == 10
    assert failure.outcome is Outcome.RATE_LIMITED
    assert [blamed(failure)] == list(limits)
    assert failure.cost == 0
    assert len(server.requests) == totals["judge/calls"] == 1
    assert totals["judge/rate_limited"] == totals["judge/retries"] == 0


def test_all_questions_that_wait_for_the_rate_count_as_waits_for_it(server):
    limits = {"requests_per_minute": 2, "max_concurrency": 2}
    _, late, totals = ask_then_in_a_hurry(server, 2, 8, limits=limits)
    assert {failure.outcome for failure in late} == {Outcome.RATE_LIMITED}
    assert set(map(blamed, late)) == {"requests_per_minute"}
    assert totals["timing/judge_wait_requests_per_minute_s"] == pytest.approx(8, abs=1)
    assert totals["timing/judge_wait_max_concurrency_s"] < 1
    assert len(server.requests) == 2
    assert "a free slot" not in describe_wait(totals | {"judge/calls": 2}, 59.5, 60)


def test_a_question_that_never_gets_a_slot_times_out(server):
    release_first = threading.Event()

    def held(request):
        release_first.wait(30)
        return says(score=10)

    server.behaviour = held

    async def run():
        patient, hasty = (
            JudgeClient(server.judge(limits={"max_concurrency": 1, "deadline_seconds": seconds}))
            for seconds in (60, 0.5)
        )
        first = asyncio.create_task(patient.ask(QUESTION))
        while not server.requests:
            await asyncio.sleep(0.01)
        with pytest.raises(JudgeFailure) as caught:
            await hasty.ask(QUESTION)
        release_first.set()
        answer = await first
        for client in (patient, hasty):
            await client.close()
        return answer, caught.value

    answer, failure = asyncio.run(run())
    assert answer.verdicts["X"]["score"] == 10
    assert failure.outcome is Outcome.TIMEOUT
    assert blamed(failure) == "max_concurrency"
    assert len(server.requests) == 1


def test_questions_that_were_held_back_by_retry_after_say_so(server):
    server.behaviour = lambda request: refuses(429, retry_after="3000")
    limits = {"max_concurrency": 2}
    (refused,), held, totals = ask_then_in_a_hurry(server, 1, 6, limits=limits)
    assert {one.outcome for one in (refused, *held)} == {Outcome.RATE_LIMITED}
    assert refused.status == 429
    assert set(map(blamed, held)) == {"retry_after"}
    assert len(server.requests) == totals["judge/rate_limited"] == 1


def test_the_timeout_of_a_call_that_started_does_not_blame_a_wait(server):
    server.behaviour = lambda request: says(score=10, seconds=30)
    (failure,) = ask(server.judge(limits={"deadline_seconds": 0.5}))
    assert failure.outcome is Outcome.TIMEOUT
    assert "waiting for" not in failure.detail


# Calls at a time


@pytest.mark.parametrize("most", [1, 3])
def test_the_server_never_sees_more_calls_at_once_than_allowed(server, most):
    server.behaviour = once_together(server, most, server.behaviour)
    answers = ask(server.judge(limits={"max_concurrency": most}), *[QUESTION] * 10)
    assert not any(isinstance(one, BaseException) for one in answers)
    assert server.most_at_once == most
    assert len(server.requests) == 10


def test_a_slot_is_given_back_however_a_call_ends(server):
    limits = {"max_concurrency": 1, "num_retries": 0}

    async def run():
        patient, hasty = (
            JudgeClient(server.judge(limits=limits | {"call_timeout_seconds": seconds}))
            for seconds in (20, 0.3)
        )
        ended = []
        for client, reply in (
            (patient, refuses(500)),
            (patient, refuses(400)),
            (hasty, says(score=1, seconds=60)),
            (patient, says(score="bad")),
        ):
            server.behaviour = partial(replying, reply)
            ended += await asyncio.gather(client.ask(QUESTION), return_exceptions=True)
        server.behaviour = partial(replying, says(score=10))
        cancelled = asyncio.create_task(patient.ask(QUESTION))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        last = await patient.ask(QUESTION)
        for client in (patient, hasty):
            await client.close()
        return ended, last

    ended, last = asyncio.run(run())
    assert all(isinstance(one, JudgeFailure) for one in ended)
    assert last.verdicts["X"]["score"] == 10


def replying(reply, request):
    return reply


def start_calls(budget, number, started):
    """Start calls that last until they are cancelled, and append their numbers as they start."""

    async def call(one):
        async with budget.slot(CallPermit(), 10):
            started.append(one)
            await asyncio.sleep(60)

    return [asyncio.create_task(call(one)) for one in range(number)]


@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"max_concurrency": 1}])
def test_calls_start_in_the_order_in_which_they_came(monkeypatch, limits):
    monkeypatch.setattr("lit_grpo.judge.budget.WINDOW_SECONDS", 0.1)

    async def run():
        started = []
        calls = start_calls(CallBudget(Limits(**limits)), 5, started)
        async with asyncio.timeout(20):
            for number, call in enumerate(calls):
                while len(started) <= number:
                    await asyncio.sleep(0.01)
                call.cancel()
            await asyncio.wait(calls)
        return started

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("limits", [{"requests_per_minute": 2}, {"max_concurrency": 1}])
def test_a_call_that_is_cancelled_while_it_waits_passes_its_turn_on(monkeypatch, limits):
    monkeypatch.setattr("lit_grpo.judge.budget.WINDOW_SECONDS", 0.3)

    async def run():
        started = []
        budget = CallBudget(Limits(**{"max_concurrency": 2, **limits}))
        first, *waiting = start_calls(budget, 5, started)
        await asyncio.sleep(0.1)
        for call in waiting[1:3]:
            call.cancel()
        first.cancel()
        waiting[0].cancel()
        async with asyncio.timeout(20):
            while 4 not in started:
                await asyncio.sleep(0.01)
            waiting[3].cancel()
            await asyncio.wait([first, *waiting])
        return started, list(budget._queues.values())

    started, (queue,) = asyncio.run(run())
    assert not {2, 3} & set(started)
    assert not queue.turn.locked()
    assert not queue.slots.locked()


def test_retry_after_holds_back_all_calls(server):
    server.script(refuses(429, retry_after_ms="500"))

    async def run():
        client = JudgeClient(server.judge(limits={"max_concurrency": 1}))
        await asyncio.gather(*(client.ask(QUESTION) for _ in range(3)))
        waited = client.ledger.read().totals["timing/judge_wait_retry_after_s"]
        await client.close()
        return waited

    assert asyncio.run(run()) > 0.25
    times = [request.time for request in server.requests]
    assert len(times) == 4
    assert min(times[1:]) - times[0] >= 0.5


# Several processes


def test_the_limits_of_a_job_are_divided_among_its_processes():
    limits = Limits(max_concurrency=10, requests_per_minute=40, tokens_per_minute=4000)
    budgets = [CallBudget(limits, rank, 4) for rank in range(4)]
    assert [budget._concurrency for budget in budgets] == [3, 3, 2, 2]
    for budget in budgets:
        calls = 0
        while budget._admit(CallPermit(), 10) is None:
            calls += 1
        assert calls == 10


@pytest.mark.parametrize("name", ["max_concurrency", "requests_per_minute"])
def test_fewer_calls_than_processes_are_refused(name):
    with pytest.raises(ValueError, match=f"limits.{name} must be >= 4, got 3 .*4 processes"):
        CallBudget(Limits(**{name: 3}), 0, 4)


def test_each_process_has_its_share_of_the_money():
    budget = CallBudget(Limits(max_cost_usd=4), 0, 4)
    budget.spend(0.99)
    assert budget._admit(CallPermit(), 1) is None
    budget.spend(0.01)
    with pytest.raises(JudgeFailure) as caught:
        budget._admit(CallPermit(), 1)
    assert caught.value.outcome is Outcome.BUDGET_SPENT


def test_a_resumed_job_counts_its_earlier_cost_once():
    budget = CallBudget(Limits(max_cost_usd=4), 0, 2)
    for _ in range(2):
        budget.resume(3.0)
    assert budget.spent_usd == 1.5
    budget.spend(0.5)
    with pytest.raises(JudgeFailure):
        budget._admit(CallPermit(), 1)


# Several rewards


def test_two_clients_of_one_deployment_share_its_limits(server):
    server.behaviour = once_together(server, 2, server.behaviour)
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


@pytest.fixture
def budgets():
    """Get budgets, which are released at the end."""
    opened = []

    def get(**settings):
        opened.append(budget_of(judge(**settings)))
        return opened[-1]

    yield get
    for one in opened:
        release(one)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_concurrency": 3},
        {"requests_per_minute": 30.0},
        {"tokens_per_minute": 3000.0},
        {"max_cost_usd": 3.0},
    ],
)
def test_two_rewards_must_give_one_deployment_the_same_limits(budgets, limits):
    own = {"call_timeout_seconds": 5.0, "deadline_seconds": 50.0, "num_retries": 0}
    first = budgets(price=PRICE)
    (name,) = limits
    message = f"must have the same limits.*'{name}': {limits[name]}"
    with pytest.raises(ValueError, match=message) as caught:
        budgets(price=PRICE, limits=Limits(**limits))
    assert not any(each in str(caught.value) for each in own)
    # Timeouts and retries are not shared.
    assert budgets(price=PRICE, limits=Limits(**own)) is first
    assert budgets(model="other", price=PRICE, limits=Limits(**limits)) is not first


def test_each_client_of_a_deployment_has_timeouts_of_its_own(server):
    is_hasty_done = threading.Event()

    def held(request):
        is_hasty_done.wait(30)
        return says(score=10)

    server.behaviour = held

    async def run():
        hasty, patient = (
            JudgeClient(server.judge(limits={"call_timeout_seconds": seconds, "num_retries": 0}))
            for seconds in (0.1, 20)
        )
        asked = [asyncio.create_task(one.ask(QUESTION)) for one in (hasty, patient)]
        await asyncio.wait(asked[:1])
        is_hasty_done.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for one in (hasty, patient):
            await one.close()
        return answers

    failure, answer = asyncio.run(run())
    assert failure.outcome is Outcome.TIMEOUT
    assert answer.verdicts["X"]["score"] == 10


def test_a_budget_is_deleted_with_its_last_client():
    first, same = budget_of(judge()), budget_of(judge())
    assert first is same
    release(first)
    assert budget_of(judge()) is first
    release(first)
    release(first)
    fresh = budget_of(judge(limits=Limits(max_concurrency=1)))
    assert fresh is not first
    release(fresh)
