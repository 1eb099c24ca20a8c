"""Equal items that are asked at the same time share one call, as a real server counts them."""

import asyncio
import gc
import json
import logging
import threading

import pytest
from examiners import CONTEXT, grade_template, scores, with_examiner
from judge_server import (
    GRADED,
    PRICE,
    REPLY_COST,
    first_line_is,
    judges,
    refuses,
    says,
    writes,
)

from lit_grpo.judge.examiner import Examiner
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Grade, Text
from lit_grpo.types import Outcome

CUT_OFF = writes("", finish_reason="length")


@pytest.fixture
def server(server):
    server.behaviour = judges("answer", first_line_is("2"))
    return server


@pytest.fixture
def gate(server):
    """An event that holds back every reply until it is set."""
    opened, honest = threading.Event(), server.behaviour

    def held(request):
        opened.wait(30)
        return honest(request)

    server.behaviour = held
    yield opened
    opened.set()


def examine(examiner, texts, *, context=CONTEXT, form=GRADED, vote=0):
    return examiner.examine(context, [{"answer": text} for text in texts], form, vote=vote)


def ask_together(judge, *groups, **settings):
    """Ask for groups of texts at the same time; return their results and the totals."""

    async def scene(examiner):
        return await asyncio.gather(*(examine(examiner, texts) for texts in groups))

    return with_examiner(judge, scene, **settings)


def costs(found):
    return [one.cost for one in found]


def shown(server):
    return sorted(one.text for request in server.requests for one in request.of("answer"))


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


# One call for equal items


def test_equal_items_of_two_calls_are_asked_once_and_the_first_one_costs(server):
    (first, second), totals = ask_together(server.judge(price=PRICE), ["2", "3"], ["3", "4", "2"])
    assert shown(server) == ["2", "3", "4"]
    assert (scores(first), scores(second)) == ([10, 0], [0, 0, 10])
    assert costs(first) == pytest.approx([REPLY_COST] * 2)
    assert costs(second) == pytest.approx([0, REPLY_COST, 0])
    assert totals["judge/calls"] == 3
    assert totals["judge/cost_usd"] == pytest.approx(3 * REPLY_COST)


@pytest.mark.parametrize("items_per_call", [1, 2, 5])
def test_equal_items_of_one_call_are_asked_once_and_the_first_one_costs(server, items_per_call):
    texts = ["3", "2", "3", "2", "3"]
    judge = server.judge(price=PRICE)
    (found,), totals = ask_together(judge, texts, items_per_call=items_per_call)
    assert shown(server) == ["2", "3"]
    assert scores(found) == [0, 10, 0, 10, 0]
    assert [cost > 0 for cost in costs(found)] == [True, True, False, False, False]
    assert sum(costs(found)) == pytest.approx(totals["judge/cost_usd"])


def test_a_call_of_several_items_leaves_out_those_in_flight(server):
    groups = ["2", "3", "4"], ["5", "3", "2"]
    (first, second), totals = ask_together(server.judge(price=PRICE), *groups, items_per_call=3)
    asked = sorted(sorted(one.text for one in r.of("answer")) for r in server.requests)
    assert asked == [["2", "3", "4"], ["5"]]
    assert (scores(first), scores(second)) == ([10, 0, 0], [0, 0, 10])
    assert costs(second) == pytest.approx([REPLY_COST, 0, 0])
    assert sum(costs(first) + costs(second)) == pytest.approx(totals["judge/cost_usd"])


def test_an_equal_item_waits_for_the_retry_of_a_call_in_flight(server, monkeypatch):
    monkeypatch.setattr("lit_grpo.judge.client.FIRST_BACKOFF_SECONDS", 0.5)
    server.script(refuses(503))

    async def scene(examiner):
        first = asyncio.create_task(examine(examiner, ["2"]))
        await until(lambda: server.requests)
        return await asyncio.gather(first, examine(examiner, ["2"]))

    (first, second), totals = with_examiner(server.judge(), scene)
    assert (scores(first), scores(second)) == ([10], [10])
    assert len(server.requests) == 2
    assert totals["judge/retries"] == 1


def test_without_a_cache_a_finished_call_is_not_reused(server):
    async def scene(examiner):
        return [await examine(examiner, ["2"]) for _ in range(2)]

    (first, second), totals = with_examiner(server.judge(price=PRICE), scene)
    assert len(server.requests) == 2
    assert costs(first) == costs(second) == pytest.approx([REPLY_COST])
    assert totals["judge/cache_hits"] == 0


def test_a_shared_verdict_is_cached(server, tmp_path):
    judge = server.judge(cache=tmp_path, price=PRICE)
    ask_together(judge, ["2", "3"], ["3", "2"])
    (later,), totals = ask_together(judge, ["3", "2"])
    assert len(server.requests) == 2
    assert (scores(later), costs(later)) == ([0, 10], [0, 0])
    assert totals["judge/cache_hits"] == 2


DIFFERENT = {
    "question": {"context": CONTEXT | {"question": "0+2="}},
    "reference": {"context": CONTEXT | {"reference": None}},
    "vote": {"vote": 1},
    "form": {"form": Form({"explanation": Text(), "score": Grade(20)})},
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT)
def test_items_that_differ_in_anything_that_matters_are_asked_separately(server, different):
    async def scene(examiner):
        return await asyncio.gather(examine(examiner, ["2"]), examine(examiner, ["2"], **different))

    (first, second), totals = with_examiner(server.judge(price=PRICE), scene)
    assert len(server.requests) == 2
    assert costs(first) == costs(second) == pytest.approx([REPLY_COST])


def test_equal_votes_share_a_call_and_different_ones_never_do(server):
    opinions = iter(range(1, 10))
    server.behaviour = lambda request: says(score=next(opinions))

    async def scene(examiner):
        votes = (0, 1, 2, 0, 1, 2)
        return await asyncio.gather(*(examine(examiner, ["2", "2"], vote=v) for v in votes))

    judge = server.judge(temperature=1.0, limits={"max_concurrency": 1})
    found, _ = with_examiner(judge, scene)
    assert len(server.requests) == 3
    assert [scores(one) for one in found] == [[1, 1], [2, 2], [3, 3]] * 2


@pytest.mark.parametrize("items_per_call", [1, 3])
def test_costs_add_up_to_the_ledger_over_failures_and_retries(server, items_per_call):
    honest = server.behaviour

    def unsteady(request):
        number = len(server.requests)
        asked = [one.id for one in request.of("answer")]
        if number % 7 == 0:
            return refuses(503)
        if number % 5 == 0:
            return writes("hm")
        if len(asked) > 1 and number % 3 == 0:
            rest = [{"id": one, "explanation": "x", "score": 5} for one in asked[1:]]
            return writes(json.dumps({"verdicts": rest}))
        return CUT_OFF if "poison" in request.texts[1] else honest(request)

    server.behaviour = unsteady
    groups = [["2", "3", "poison", str(4 + number), "2"] for number in range(6)]
    judge = server.judge(price=PRICE)
    found, totals = ask_together(judge, *groups, items_per_call=items_per_call)
    every = [one for group in found for one in group]
    assert len(every) == 30
    assert all((one.verdict is None) != (one.failure is None) for one in every)
    assert totals["judge/cost_usd"] > 0
    assert sum(costs(every)) == pytest.approx(totals["judge/cost_usd"], abs=1e-12)
    assert sum(cost > 0 for cost in costs(every)) <= 9  # there are so many different texts


# Failures


def test_a_failure_is_shared_and_counted_once_too(server):
    server.behaviour = lambda request: CUT_OFF
    (first, second), _ = ask_together(server.judge(price=PRICE), ["2"], ["2", "2"])
    assert len(server.requests) == 1
    assert [one.failure.outcome for one in first + second] == [Outcome.OUT_OF_TOKENS] * 3
    assert costs(first + second) == pytest.approx([REPLY_COST, 0, 0])


def test_a_failure_is_not_kept_after_its_call(server):
    server.script(CUT_OFF)

    async def scene(examiner):
        return [await examine(examiner, ["2"]) for _ in range(2)]

    (first, second), _ = with_examiner(server.judge(), scene)
    assert (scores(first), scores(second)) == ([None], [10])


def test_a_template_that_fails_on_an_item_fails_all_waiters_and_leaves_nothing_behind(
    server, tmp_path, caplog
):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% block system %}Mark by <<{{ nonce }}.{% endblock %}{% block user %}"
        "{{ nonce }} {% for one in items %}{{ 1 // (one.answer | int) }}{% endfor %}{% endblock %}"
    )
    server.behaviour = lambda request: says(score=7)

    async def scene(examiner):
        groups = (examine(examiner, texts) for texts in (["0", "00"], ["0"]))
        failed = await asyncio.gather(*groups, return_exceptions=True)
        await until(lambda: not examiner._in_flight)
        return failed, await examine(examiner, ["1"])

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        (failed, after), _ = with_examiner(server.judge(), scene, template=own)
        gc.collect()
    assert ["fails on this row" in str(one) for one in failed] == [True, True]
    assert scores(after) == [7]
    assert not caplog.records


# Cancellation


@pytest.mark.parametrize("gone", [0, 1], ids=["the first", "the second"])
def test_cancelling_one_waiter_leaves_the_other_its_answer(server, gate, gone):
    async def scene(examiner):
        waiters = [asyncio.create_task(examine(examiner, ["2", "3"])) for _ in range(2)]
        await until(lambda: len(server.requests) == 2)
        waiters[gone].cancel()
        await asyncio.wait([waiters[gone]])
        gate.set()
        return waiters[gone].cancelled(), await waiters[1 - gone]

    (is_gone, found), totals = with_examiner(server.judge(), scene)
    assert is_gone
    assert scores(found) == [10, 0]
    assert totals["judge/calls"] == len(server.requests) == 2


def test_a_verdict_without_waiters_is_cached_since_it_was_paid_for(server, gate, tmp_path):
    judge = server.judge(cache=tmp_path)

    async def scene(examiner):
        waiter = asyncio.create_task(examine(examiner, ["2"]))
        await until(lambda: server.requests)
        waiter.cancel()
        await asyncio.wait([waiter])
        gate.set()
        await until(lambda: not examiner._in_flight)
        return await examine(examiner, ["2"])

    found, totals = with_examiner(judge, scene)
    assert scores(found) == [10]
    assert len(server.requests) == totals["judge/cache_hits"] == 1


@pytest.mark.timeout(60)
def test_closing_cancels_all_calls_in_flight(server):
    server.behaviour = lambda request: says(score=10, seconds=600)
    patient = {"call_timeout_seconds": 600, "deadline_seconds": 600}

    async def run():
        examiner = Examiner(judge=server.judge(limits=patient), template=grade_template())
        tasks = [asyncio.create_task(examine(examiner, ["2", "3"])) for _ in range(3)]
        await until(lambda: len(server.requests) == 2)
        tasks[0].cancel()
        await examiner.close()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    # Its budget is released too: another reward may set other limits.
    server.behaviour = judges("answer", first_line_is("2"))
    (found,), _ = ask_together(server.judge(limits={"max_concurrency": 1}), ["2"])
    assert scores(found) == [10]
    assert len(server.requests) == 3


def test_all_waiters_learn_that_the_budget_is_spent(server):
    limits = {"max_cost_usd": 0.5 * REPLY_COST, "max_concurrency": 1}
    judge = server.judge(price=PRICE, limits=limits)
    (first, second), totals = ask_together(judge, ["2", "3"], ["3", "2"])
    assert scores(first) == [10, None]
    assert scores(second) == [None, 10]
    for failed in (first[1], second[0]):
        assert isinstance(failed.failure, JudgeFailure)
        assert failed.failure.outcome is Outcome.BUDGET_SPENT
    assert totals["judge/calls"] == 1
