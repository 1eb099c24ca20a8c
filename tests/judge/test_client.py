import asyncio
import logging
import socket
from collections import defaultdict

import pytest
from judge_server import (
    DROPS,
    GRADED,
    PRICE,
    QUESTION,
    REPLY_COST,
    Reply,
    ask,
    ask_with_totals,
    refuses,
    says,
    writes,
)
from worker_processes import wait_until

from lit_grpo.judge import Judge, Limits, client
from lit_grpo.judge.client import MAX_BACKOFF_SECONDS, JudgeClient, Question, _seconds_before_retry
from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome

CUT_OFF = writes("", finish_reason="length")
FILTERED = writes(None, finish_reason="content_filter")
DECLINED = writes(None, refusal="I will not.")
FILTERED_PROMPT = refuses(400, "The response was filtered", code="content_filter")
NO_QUOTA = refuses(429, "You exceeded your current quota", code="insufficient_quota")
NO_SCHEMAS = refuses(400, "Unknown parameter: 'response_format.json_schema'")


def question(text):
    return Question(messages=[{"role": "user", "content": text}], form=GRADED, ids=["X"])


def score(answer):
    assert not isinstance(answer, BaseException), repr(answer)
    return answer.verdicts["X"]["score"]


def check_access(judge):
    async def run():
        client = JudgeClient(judge)
        try:
            await client.check_access()
        finally:
            await client.close()

    asyncio.run(run())


# Requests


def test_a_question_is_one_request_with_its_sampling_and_a_strict_schema(server):
    judge = server.judge(temperature=0.5, max_completion_tokens=77, extra_body={"top_k": 3})
    (answer,) = ask(judge)
    assert score(answer) == 10
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    sent = {name: request.body[name] for name in ("temperature", "max_completion_tokens", "top_k")}
    assert sent == {"temperature": 0.5, "max_completion_tokens": 77, "top_k": 3}
    assert request.body["response_format"]["json_schema"]["strict"] is True
    assert request.schema == GRADED.schema(1)


def test_no_temperature_is_sent_when_it_is_null(server):
    ask(server.judge(temperature=None))
    assert "temperature" not in server.requests[0].body


@pytest.mark.parametrize("extra_body", [None, {}])
def test_extra_body_may_be_null_or_empty(server, extra_body):
    ask(server.judge(extra_body=extra_body))
    known = {"model", "messages", "max_completion_tokens", "temperature", "response_format"}
    assert set(server.requests[0].body) == known


def test_the_text_format_sends_no_schema(server):
    ask(server.judge(reply_format="text"))
    assert server.requests[0].schema is None


def test_a_server_that_rejects_the_schema_is_asked_without_it_from_then_on(server):
    server.behaviour = lambda request: NO_SCHEMAS if request.schema else says(score=4)

    async def run():
        client = JudgeClient(server.judge(limits={"num_retries": 0}))
        found = [score(await client.ask(QUESTION)) for _ in range(3)]
        totals = client.ledger.read().totals
        await client.close()
        return found, totals

    found, totals = asyncio.run(run())
    assert found == [4, 4, 4]
    assert [request.schema is not None for request in server.requests] == [True] + [False] * 3
    assert totals["judge/calls"] == 4
    assert totals["judge/retries"] == 0


def test_parallel_questions_whose_schema_is_rejected_are_all_asked_without_it(server):
    server.behaviour = lambda request: NO_SCHEMAS if request.schema else says(score=4)
    answers = ask(server.judge(limits={"num_retries": 0}), *[QUESTION] * 4)
    assert [score(one) for one in answers] == [4] * 4


def test_a_rejected_schema_is_a_failure_with_the_schema_format(server):
    server.behaviour = lambda request: NO_SCHEMAS
    (failure,) = ask(server.judge(reply_format="schema"))
    assert failure.outcome is Outcome.ERROR
    assert len(server.requests) == 1


def test_other_bad_requests_are_not_repeated_without_the_schema(server):
    server.script(refuses(400, "maximum context length exceeded", "context_length_exceeded"))
    (failure,) = ask(server.judge())
    assert failure.outcome is Outcome.ERROR
    assert len(server.requests) == 1


# Failures

PERMANENT = {
    "cut off": (CUT_OFF, Outcome.OUT_OF_TOKENS),
    "reply filtered": (FILTERED, Outcome.CONTENT_FILTERED),
    "declined": (DECLINED, Outcome.CONTENT_FILTERED),
    "prompt filtered": (FILTERED_PROMPT, Outcome.CONTENT_FILTERED),
    "no quota": (NO_QUOTA, Outcome.RATE_LIMITED),
    "bad request": (refuses(400), Outcome.ERROR),
    "no access": (refuses(401), Outcome.ERROR),
    "forbidden": (refuses(403), Outcome.ERROR),
    "not found": (refuses(404), Outcome.ERROR),
}


@pytest.mark.parametrize(("reply", "outcome"), PERMANENT.values(), ids=PERMANENT)
def test_permanent_failures_are_not_retried(server, reply, outcome):
    server.behaviour = lambda request: reply
    (failure,), totals = ask_with_totals(server.judge())
    assert isinstance(failure, JudgeFailure)
    assert failure.outcome is outcome
    assert len(server.requests) == totals["judge/calls"] == 1
    assert totals["judge/retries"] == 0


TRANSIENT = {
    "rate limit": (refuses(429, retry_after_ms="1"), Outcome.RATE_LIMITED, 6),
    "server error": (refuses(500), Outcome.UNAVAILABLE, 6),
    "bad gateway": (Reply(b"<html>", status=502), Outcome.UNAVAILABLE, 6),
    "overloaded": (refuses(503), Outcome.UNAVAILABLE, 6),
    "dropped": (DROPS, Outcome.UNAVAILABLE, 6),
    "request timeout": (refuses(408), Outcome.TIMEOUT, 6),
    "an empty body": (Reply(b""), Outcome.UNAVAILABLE, 6),
    "no content at all": (Reply(b"", status=204), Outcome.UNAVAILABLE, 6),
    "malformed JSON": (Reply(b'{"choices": [{"mess'), Outcome.PARSE_ERROR, 3),
    "not a completion": (Reply({"ok": True}), Outcome.PARSE_ERROR, 3),
    "a list": (Reply([]), Outcome.PARSE_ERROR, 3),
    "null": (Reply(None), Outcome.PARSE_ERROR, 3),
    "no choices": (Reply({"choices": []}), Outcome.PARSE_ERROR, 3),
    "choices of another kind": (Reply({"choices": "none"}), Outcome.PARSE_ERROR, 3),
    "no message": (Reply({"choices": [{"finish_reason": "stop"}]}), Outcome.PARSE_ERROR, 3),
    "empty": (writes(""), Outcome.PARSE_ERROR, 3),
    "no content": (writes(None), Outcome.PARSE_ERROR, 3),
    "content of another kind": (writes([{"type": "text"}]), Outcome.PARSE_ERROR, 3),
    "prose": (writes("A fine answer, 10 of 10."), Outcome.PARSE_ERROR, 3),
    "wrong type": (says(score="good"), Outcome.PARSE_ERROR, 3),
    "out of range": (says(score=11), Outcome.PARSE_ERROR, 3),
}


@pytest.mark.parametrize(("reply", "outcome", "calls"), TRANSIENT.values(), ids=TRANSIENT)
def test_transient_failures_are_retried_with_one_request_per_try(server, reply, outcome, calls):
    server.behaviour = lambda request: reply
    (failure,), totals = ask_with_totals(server.judge())
    assert isinstance(failure, JudgeFailure)
    assert failure.outcome is outcome
    assert len(server.requests) == totals["judge/calls"] == calls
    assert totals["judge/retries"] == calls - 1
    assert totals["judge/rate_limited"] == (calls if outcome is Outcome.RATE_LIMITED else 0)
    assert totals["judge/parse_errors"] == (calls if outcome is Outcome.PARSE_ERROR else 0)
    assert f"({calls} calls)" in str(failure)


PAGE = Reply(b"<!doctype html><title>Sign in</title>", headers={"content-type": "text/html"})
TO_LOGIN = Reply(b"", status=302, headers={"location": "/login?secret=1"})


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (PAGE, "status 200, text/html, '<!doctype html><title>Sign in</title>'"),
        (TO_LOGIN, "/login, text/html, '<!doctype html><title>Sign in</title>'"),
        (Reply(PAGE.body), "status 200, application/json, '<!doctype html><title>Sign in</title>'"),
        (Reply(b"no healthy upstream"), "status 200, application/json, 'no healthy upstream'"),
        (Reply(b""), "status 200, application/json, an empty body"),
        (Reply(b"", status=204), "status 204, application/json, an empty body"),
    ],
    ids=["page", "redirect", "page that claims to be JSON", "text", "empty", "204"],
)
def test_a_reply_that_is_no_json_is_described_with_what_to_check(server, reply, said):
    server.behaviour = lambda request: PAGE if request.path.startswith("/login") else reply
    (failure,) = ask(server.judge(limits={"num_retries": 0}))
    assert failure.outcome is Outcome.UNAVAILABLE
    assert said in failure.detail
    assert "check base_url, which as a rule ends in /v1, and proxies" in failure.detail
    assert "JSONDecodeError" not in failure.detail
    assert "secret" not in failure.detail


def test_a_reply_that_is_cut_off_is_shown(server):
    server.behaviour = lambda request: Reply(b'{"choices": [{"mess')
    (failure,) = ask(server.judge(limits={"num_retries": 0}))
    assert failure.outcome is Outcome.PARSE_ERROR
    assert 'JSON that cannot be read: \'{"choices": [{"mess\'' in failure.detail


RETRIED = ("rate limit", "server error", "dropped", "malformed JSON", "prose")


@pytest.mark.parametrize("reply", [TRANSIENT[name][0] for name in RETRIED], ids=RETRIED)
def test_a_retry_that_succeeds_counts(server, reply):
    server.script(reply)
    (answer,), totals = ask_with_totals(server.judge())
    assert score(answer) == 10
    assert totals["judge/calls"] == 2
    assert totals["judge/retries"] == 1


def test_a_server_that_cannot_be_reached_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        judge = Judge(model="m", base_url=url, auth="none", limits=Limits(num_retries=1))
        (failure,), totals = ask_with_totals(judge)
    assert failure.outcome is Outcome.UNAVAILABLE
    assert f"no connection to {url}/chat/completions (" in str(failure)
    assert totals["judge/calls"] == 2


def test_a_late_reply_is_a_timeout_and_its_latency_is_recorded(server):
    server.behaviour = lambda request: says(score=10, seconds=30)
    limits = {"call_timeout_seconds": 0.2, "num_retries": 1}

    async def run():
        client = JudgeClient(server.judge(limits=limits))
        with pytest.raises(JudgeFailure, match="call_timeout_seconds") as caught:
            await client.ask(QUESTION)
        observed = client.ledger.read()
        await client.close()
        return caught.value, observed

    failure, observed = asyncio.run(run())
    latencies = observed.samples["timing/judge_api_latency_s"]
    assert failure.outcome is Outcome.TIMEOUT
    assert observed.totals["judge/calls"] == len(latencies) == 2
    assert min(latencies) >= 0.2


@pytest.mark.timeout(60)
def test_the_deadline_ends_a_question_with_its_last_informative_failure(server):
    server.script(refuses(503, "down for repairs"))
    server.behaviour = lambda request: says(score=10, seconds=600)
    (failure,) = ask(server.judge(limits={"deadline_seconds": 4.0, "call_timeout_seconds": 600}))
    assert failure.outcome is Outcome.UNAVAILABLE
    assert "down for repairs" in str(failure)


def test_the_wait_of_a_question_that_never_gets_a_slot_is_counted(server):
    server.behaviour = lambda request: says(score=10, seconds=30)
    limits = {"deadline_seconds": 0.3, "max_concurrency": 1}
    failures, totals = ask_with_totals(server.judge(limits=limits), *[QUESTION] * 3)
    assert [one.outcome for one in failures] == [Outcome.TIMEOUT] * 3
    assert totals["timing/judge_wait_max_concurrency_s"] > 0.3


@pytest.mark.timeout(60)
def test_a_wait_beyond_the_deadline_is_not_started(server):
    server.behaviour = lambda request: refuses(429, retry_after="3000")
    (failure,) = ask(server.judge(limits={"deadline_seconds": 2000}))
    assert failure.outcome is Outcome.RATE_LIMITED
    assert len(server.requests) == 1


# Waits


def test_a_retry_waits_as_long_as_the_server_asks(server):
    server.script(refuses(429, retry_after_ms="300"))
    ask(server.judge())
    first, second = (request.time for request in server.requests)
    assert second - first >= 0.3


def test_calls_that_were_refused_together_return_at_different_times(server, monkeypatch):
    times, waits = defaultdict(list), []

    def refuse_the_first(request):
        times[request.texts[0]].append(request.time)
        is_first = len(times[request.texts[0]]) == 1
        return refuses(429, retry_after_ms="200") if is_first else says(score=10)

    def seconds_before_retry(*arguments):
        waits.append(_seconds_before_retry(*arguments))
        return waits[-1]

    monkeypatch.setattr(client, "_seconds_before_retry", seconds_before_retry)
    server.behaviour = refuse_the_first
    answers = ask(server.judge(), *[question(f"Grade {i}.") for i in range(8)])
    assert [score(one) for one in answers] == [10] * 8
    assert len(set(waits)) == 8
    assert min(waits) >= 0.2
    absences = sorted(back - refused for refused, back in times.values())
    assert all(one >= wait for one, wait in zip(absences, sorted(waits), strict=True))


@pytest.mark.parametrize("asked", [0.0, 0.2, 4.0, 100.0])
def test_retry_after_gets_a_random_extra_and_is_never_shortened(asked):
    failure = JudgeFailure(Outcome.RATE_LIMITED, "slow", is_transient=True, retry_after=asked)
    waits = [_seconds_before_retry([failure], 5) for _ in range(100)]
    most = asked + 0.25 * max(1.0, asked)
    assert asked <= min(waits) < max(waits) <= most
    assert max(waits) - min(waits) > 0.5 * (most - asked)


def test_a_question_that_waits_for_its_retry_holds_no_slot(server, monkeypatch):
    monkeypatch.setattr("lit_grpo.judge.client.FIRST_BACKOFF_SECONDS", 1.0)
    server.behaviour = lambda request: (
        refuses(503) if request.texts == ["bad"] and num_bad() < 2 else says(score=10)
    )

    def num_bad():
        return sum(request.texts == ["bad"] for request in server.requests)

    judge = server.judge(limits={"max_concurrency": 1})
    answers = ask(judge, question("bad"), question("good"), question("good"))
    assert [score(one) for one in answers] == [10] * 3
    assert [request.texts[0] for request in server.requests] == ["bad", "good", "good", "bad"]
    assert server.most_at_once == 1


def test_backoff_grows_and_is_jittered():
    failures = [JudgeFailure(Outcome.UNAVAILABLE, "down", is_transient=True)]
    for tries in range(1, 12):
        waits = {_seconds_before_retry(failures * tries, 99) for _ in range(20)}
        ceiling = min(MAX_BACKOFF_SECONDS, 0.01 * 2 ** (tries - 1))
        assert len(waits) > 1
        assert 0.5 * ceiling <= min(waits) <= max(waits) <= 1.5 * ceiling


# Cost


def test_unreadable_replies_cost_money_too(server):
    server.script(writes("hm"), writes("hm"))
    (answer,), totals = ask_with_totals(server.judge(price=PRICE))
    assert answer.cost == pytest.approx(3 * REPLY_COST)
    assert totals["judge/cost_usd"] == pytest.approx(3 * REPLY_COST)
    assert totals["judge/prompt_tokens"] == 300
    assert totals["judge/completion_tokens"] == 30


@pytest.mark.parametrize("reply", [CUT_OFF, FILTERED, writes("hm")])
def test_a_failure_carries_the_cost_of_its_calls(server, reply):
    server.behaviour = lambda request: reply
    (failure,), totals = ask_with_totals(server.judge(price=PRICE))
    assert failure.cost == pytest.approx(totals["judge/cost_usd"])
    assert failure.cost == pytest.approx(len(server.requests) * REPLY_COST)


UNKNOWN = {"prompt_tokens": -1, "completion_tokens": -1}
PARTLY = {"prompt_tokens": 100, "completion_tokens": -500}


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": None}, "many", [], UNKNOWN, PARTLY], ids=str
)
def test_the_tokens_of_a_reply_without_usage_are_estimated_with_one_warning(server, usage, caplog):
    body = says(score=10).body | {"usage": usage}
    server.behaviour = lambda request: Reply(body)
    (answer, _), totals = ask_with_totals(server.judge(price=PRICE), QUESTION, QUESTION)
    assert score(answer) == 10
    asked = sum(len(one["content"]) for one in server.requests[0].body["messages"])
    prompt_tokens = -(-asked // 4)
    reply_tokens = -(-len(body["choices"][0]["message"]["content"]) // 4)
    assert totals["judge/prompt_tokens"] == 2 * prompt_tokens
    assert totals["judge/completion_tokens"] == 2 * reply_tokens
    assert answer.cost == pytest.approx(totals["judge/cost_usd"] / 2)
    assert answer.cost > 0
    assert caplog.text.count("does not report the tokens of its replies") == 1


@pytest.mark.parametrize("usage", [None, PARTLY], ids=["none", "negative"])
def test_a_budget_ends_also_if_the_judge_reports_no_usage(server, usage):
    body = says(score=10).body | {"usage": usage}
    server.behaviour = lambda request: Reply(body)
    limits = {"max_cost_usd": 1e-9, "max_concurrency": 1}
    answers = ask(server.judge(price=PRICE, limits=limits), *[QUESTION] * 3)
    outcomes = [getattr(one, "outcome", Outcome.OK) for one in answers]
    assert sorted(outcomes) == [Outcome.BUDGET_SPENT] * 2 + [Outcome.OK]


@pytest.mark.parametrize(
    ("body", "outcome", "detail"),
    [
        ({"error": {"message": "provider is down"}}, Outcome.UNAVAILABLE, "provider is down"),
        ({"choices": []}, Outcome.PARSE_ERROR, "not a chat completion: it has no choices"),
    ],
)
def test_a_body_without_a_choice_shows_the_error_that_it_has(server, body, outcome, detail):
    server.behaviour = lambda request: Reply(body)
    (failure,) = ask(server.judge(limits={"num_retries": 0}))
    assert failure.outcome is outcome
    assert detail in str(failure)


def test_no_request_is_made_once_the_budget_is_spent(server):
    limits = {"max_cost_usd": 2.5 * REPLY_COST, "max_concurrency": 1}
    answers = ask(server.judge(price=PRICE, limits=limits), *[QUESTION] * 6)
    outcomes = [getattr(one, "outcome", Outcome.OK) for one in answers]
    assert sorted(outcomes) == [Outcome.BUDGET_SPENT] * 3 + [Outcome.OK] * 3
    assert len(server.requests) == 3
    (failure,) = {str(one) for one in answers if isinstance(one, JudgeFailure)}
    assert "limits.max_cost_usd" in failure


# Access


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "the key or token is wrong"), (403, "the role"), (404, "no such deployment")],
)
def test_denied_access_is_an_error_that_says_what_to_set(server, status, advice, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hush-hush")
    server.script(refuses(status, "computer says no"))
    with pytest.raises(ValueError, match=advice) as caught:
        check_access(server.judge(auth="key", secret_variable="MY_KEY"))
    for part in (str(status), server.url, "'m'", "computer says no", "base_url", "MY_KEY"):
        assert part in str(caught.value)
    assert "hush-hush" not in str(caught.value)
    assert len(server.requests) == 1


def test_an_outage_at_the_start_is_logged(server, caplog):
    server.script(*[refuses(503, "back at noon")] * 2)
    with caplog.at_level(logging.WARNING):
        check_access(server.judge(limits={"num_retries": 1}))
    assert "back at noon" in caplog.text


def test_an_unreadable_answer_at_the_start_says_what_was_asked_for(server, caplog):
    server.script(writes('{"score": 3}'))
    with caplog.at_level(logging.WARNING):
        check_access(server.judge(limits={"num_retries": 0}))
    assert "answered a test question in another form than was asked for" in caplog.text
    assert """no JSON object with 'answer': '{"score": 3}'""" in caplog.text


def test_the_check_of_a_working_judge_asks_one_question(server):
    check_access(server.judge())
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_a_key_that_a_server_repeats_is_not_shown(server, status, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", "hush-hush")
    server.script(*[refuses(status, "bad Bearer hush-hush")] * 2)
    judge = server.judge(auth="key", secret_variable="MY_KEY", limits={"num_retries": 0})
    with caplog.at_level(logging.DEBUG, logger="lit_grpo"):
        (failure,) = ask(judge)
        try:
            check_access(judge)
            refusal = ""
        except ValueError as error:
            refusal = str(error)
    assert [one.headers["authorization"] for one in server.requests] == ["Bearer hush-hush"] * 2
    shown = f"{failure} {failure!r} {failure.detail} {judge} {refusal} {caplog.text}"
    assert "bad Bearer [secret]" in shown
    assert "hush-hush" not in shown


# With llmock, which checks how the client retries


def llmock_judge(**limits):
    limits = {"call_timeout_seconds": 20.0, "deadline_seconds": 60.0} | limits
    return Judge(model="gpt-4o-mini", limits=Limits(**limits))


def test_rate_limits_are_waited_for(llmock):
    llmock.rate_limit(times=2, retry_after=0.3)
    (answer,), totals = ask_with_totals(llmock_judge())
    assert score(answer) in range(11)
    assert totals["judge/rate_limited"] == totals["judge/retries"] == 2
    assert len(llmock.requests) == 3
    llmock.assert_resilient(strict=True)


def test_many_parallel_questions_keep_to_the_rate_limit(llmock):
    llmock.rate_limit(times=6, retry_after=0.3)
    questions = [question(f"Grade {i}.") for i in range(12)]
    answers, totals = ask_with_totals(llmock_judge(), *questions)
    assert all(score(one) in range(11) for one in answers)
    assert len(llmock.requests) == totals["judge/calls"] == 18
    llmock.assert_resilient(strict=True)


def test_an_outage_is_unavailable_after_the_retries(llmock, monkeypatch):
    monkeypatch.setattr("lit_grpo.judge.client.FIRST_BACKOFF_SECONDS", 0.2)
    llmock.fail(500, times=None)
    (failure,) = ask(llmock_judge(num_retries=3))
    assert failure.outcome is Outcome.UNAVAILABLE
    assert len(llmock.requests) == 4
    llmock.assert_resilient()


def test_a_transient_server_error_is_retried(llmock, monkeypatch):
    monkeypatch.setattr("lit_grpo.judge.client.FIRST_BACKOFF_SECONDS", 0.3)
    llmock.fail(500, times=2)
    (answer,) = ask(llmock_judge())
    assert score(answer) in range(11)
    llmock.assert_resilient()


def test_a_delay_beyond_the_timeout_is_retried(llmock):
    llmock.delay(3.0)
    (answer,) = ask(llmock_judge(call_timeout_seconds=1.0))
    assert score(answer) in range(11)
    # The late one counts once its delay is over; on a busy machine there are more.
    wait_until(lambda: len(llmock.requests) >= 2)


def test_prose_is_a_parse_error(llmock):
    llmock.reply("I would say it deserves full marks.", times=None)
    (failure,), totals = ask_with_totals(llmock_judge())
    assert failure.outcome is Outcome.PARSE_ERROR
    assert totals["judge/parse_errors"] == len(llmock.requests) == 3


def test_denied_access_is_not_retried(llmock):
    llmock.fail(401, times=None)
    with pytest.raises(ValueError, match="OPENAI_API_KEY"):
        check_access(llmock_judge())
    assert len(llmock.requests) == 1
    llmock.assert_resilient(strict=True)
