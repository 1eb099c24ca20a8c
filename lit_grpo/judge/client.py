"""Asks a judge one question and gets a checked reply: the only place that calls and tries again.

A failure is raised with its outcome; nothing here turns one into a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.concurrency import backoff, jitter
from lit_grpo.judge.budget import CallBudget, Grant, budget_of, release
from lit_grpo.judge.config import Judge
from lit_grpo.judge.connection import connect, secret_variables, without_secret
from lit_grpo.judge.failures import JudgeFailure, as_failure
from lit_grpo.judge.ledger import Ledger, Usage
from lit_grpo.judge.reply import Form, Text, Verdict, read_reply
from lit_grpo.types import Message, Outcome, UserError

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
RETRY_AFTER_JITTER = 0.25
"""Added to what the server asks for, at most: those refused together come back apart."""
CHARACTERS_PER_TOKEN = 4
MAX_UNREADABLE = 3
"""Replies without the form, after which a question is given up: each of them is paid for."""
COUNTED = {Outcome.RATE_LIMITED: "rate_limited", Outcome.PARSE_ERROR: "parse_errors"}
"""Failed calls that the books count by themselves, under these names."""
NO_REPLY_TOKENS = 256
"""What a reply is taken to be long before any has come."""

PROBE = Form({"answer": Text()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is sent, and the form of the reply.

    ``ids`` are of the items that a verdict is wanted of.
    """

    messages: Sequence[Message]
    form: Form
    ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The verdicts of one question by id; an id without exactly one verdict is left out."""

    verdicts: Mapping[str, Verdict]
    cost: float
    """US dollars of every call that the question took."""


class JudgeClient:
    """A judge that can be asked; it belongs to the event loop that asks it first.

    Raises:
        ValueError: an address or a secret that is missing, or limits that cannot be kept.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.ledger = Ledger()
        self._client = connect(judge)
        self.budget: CallBudget = budget_of(judge)
        self._demands_schema = judge.reply_format != "text"
        self._reply_tokens: float = min(NO_REPLY_TOKENS, judge.max_completion_tokens)

    async def close(self) -> None:
        release(self.budget)
        await self._client.close()

    async def check_access(self) -> None:
        """Asks one small question.

        Raises:
            ValueError: the judge refuses us for a reason that a person has to remove.
        """
        messages = [{"role": "user", "content": f"Are you ready? {PROBE.words(1)}"}]
        try:
            await self.ask(Question(messages=messages, form=PROBE, ids=["probe"]))
        except JudgeFailure as failure:
            if failure.is_access:
                raise UserError(self._explain_access(failure)) from None
            log.warning("judge %s answers no question yet: %s", self.judge.model, failure)

    def _explain_access(self, failure: JudgeFailure) -> str:
        judge = self.judge
        variables = " or ".join(secret_variables(judge))
        secret = {"key": f"the key in {variables}", "token": f"the token in {variables}"}
        return (
            f"the judge must answer before training begins, {self._client.base_url} answered "
            f"{failure.status} for model {judge.model!r}: {failure.detail}. Set model, base_url, "
            f"api (now {judge.api}) or {secret.get(judge.auth, f'auth (now {judge.auth})')}."
        )

    async def ask(self, question: Question) -> Answer:
        """The reply to a question, after as many calls as it takes.

        Raises:
            JudgeFailure: no reply of the form came within the retries and the deadline.
        """
        deadline = time.monotonic() + self.judge.limits.deadline_seconds
        costs: list[float] = []
        failures: list[JudgeFailure] = []
        while True:
            by_schema, grant = self._demands_schema, Grant()
            try:
                async with asyncio.timeout_at(_loop_time(deadline)) as timer:
                    verdicts = await self._call(question, by_schema, grant, costs)
                return Answer(verdicts=verdicts, cost=sum(costs))
            except Exception as error:
                is_waiting = timer.expired() and not grant.is_given
                failure = grant.explain() if is_waiting else as_failure(error)
            if by_schema and failure.refuses_schema and self.judge.reply_format == "auto":
                self._give_up_schema(failure)
                continue
            failures.append(failure)
            if grant.is_given and failure.outcome in COUNTED:
                self.ledger.count(COUNTED[failure.outcome])
            wait = _seconds_before_retry(failures, self.judge.limits.num_retries)
            if wait is None or time.monotonic() + wait > deadline:
                raise _last_word(failures, sum(costs))
            self.ledger.count("retries")
            await asyncio.sleep(wait)

    async def _call(
        self, question: Question, by_schema: bool, grant: Grant, costs: list[float]
    ) -> Mapping[str, Verdict]:
        """One HTTP request, whatever comes of it entered in the books."""
        request = self._request(question, by_schema)
        try:
            async with self.budget.slot(grant, self._expected_tokens(question)):
                completion = await self._send(request)
                costs.append(self._enter(completion, grant))
        finally:
            self.ledger.enter_waits(grant.waited)
        return read_reply(_text_of(completion, self.judge), question.form, question.ids)

    async def _send(self, request: Mapping[str, Any]) -> Any:
        from openai.types.chat import ChatCompletion

        limit = self.judge.limits.call_timeout_seconds
        self.ledger.count("calls")
        start = time.monotonic()
        try:
            async with asyncio.timeout(limit) as timer:
                # What chat.completions.create does, without its walk over all arguments.
                return await self._client.post(
                    "/chat/completions", body=dict(request), cast_to=ChatCompletion
                )
        except Exception as error:
            if timer.expired():
                raise JudgeFailure(
                    Outcome.TIMEOUT,
                    f"no reply within {limit:g} s (limits.call_timeout_seconds)",
                    may_pass=True,
                ) from error
            failure = as_failure(error)
            failure.detail = without_secret(failure.detail, self.judge)
            if failure.retry_after:
                self.budget.hold_off(failure.retry_after)
            raise failure from None
        finally:
            self.ledger.sample("timing/judge_api_latency_s", time.monotonic() - start)

    def _request(self, question: Question, by_schema: bool) -> dict[str, Any]:
        judge = self.judge
        request: dict[str, Any] = {
            "model": judge.model,
            "messages": list(question.messages),
            "max_completion_tokens": judge.max_completion_tokens,
        }
        if judge.temperature is not None:
            request["temperature"] = judge.temperature
        if by_schema:
            schema = {
                "name": "verdicts",
                "strict": True,
                "schema": question.form.schema(len(question.ids)),
            }
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return request | dict(judge.extra_body or {})

    def _expected_tokens(self, question: Question) -> float:
        characters = sum(len(message["content"]) for message in question.messages)
        return characters / CHARACTERS_PER_TOKEN + self._reply_tokens

    def _enter(self, completion: Any, grant: Grant) -> float:
        """Books what a reply took, and returns its cost."""
        usage = Usage.of(getattr(completion, "usage", None))
        cost = usage.cost(self.judge.price)
        self.ledger.enter_usage(usage, cost)
        self.budget.spend(cost)
        if usage.num_tokens:
            grant.settle(usage.num_tokens)
            # The next call is expected to take what the last ones took.
            self._reply_tokens += 0.1 * (usage.completion_tokens - self._reply_tokens)
        return cost

    def _give_up_schema(self, failure: JudgeFailure) -> None:
        if self._demands_schema:
            self._demands_schema = False
            log.info(
                "judge %s knows no reply schemas (%s): replies are asked for in words from now on. "
                "Set reply_format to text to ask so from the start.",
                self.judge.model,
                failure.detail,
            )


def _text_of(completion: Any, judge: Judge) -> str:
    """What the judge wrote.

    Raises:
        JudgeFailure: nothing, half of it, or a filter's stop.
    """
    try:
        choice = completion.choices[0]
        content, refusal = choice.message.content, choice.message.refusal
    except (AttributeError, LookupError, TypeError):
        shown = repr(completion)[:200]
        raise JudgeFailure(
            Outcome.PARSE_ERROR, f"not a chat completion: {shown}", may_pass=True
        ) from None
    if choice.finish_reason == "length":
        raise JudgeFailure(
            Outcome.OUT_OF_TOKENS,
            f"the reply was cut off at max_completion_tokens {judge.max_completion_tokens}; "
            "a reasoning model spends them on thoughts first",
        )
    if choice.finish_reason == "content_filter" or refusal:
        detail = refusal or "the reply was stopped by the content filter"
        raise JudgeFailure(Outcome.CONTENT_FILTERED, detail)
    if not content or not isinstance(content, str):
        raise JudgeFailure(Outcome.PARSE_ERROR, "an empty reply", may_pass=True)
    return content


def _seconds_before_retry(failures: Sequence[JudgeFailure], num_retries: int) -> float | None:
    """How long to wait before the next call; None when there is to be none."""
    last = failures[-1]
    num_unreadable = sum(one.outcome is Outcome.PARSE_ERROR for one in failures)
    if not last.may_pass or len(failures) > num_retries or num_unreadable >= MAX_UNREADABLE:
        return None
    if last.retry_after is not None:
        return last.retry_after + jitter.uniform(0, RETRY_AFTER_JITTER * max(1, last.retry_after))
    return backoff(len(failures), FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)


def _last_word(failures: Sequence[JudgeFailure], cost: float) -> JudgeFailure:
    """The last failure that says more than that the time was up."""
    telling = [one for one in failures if one.outcome is not Outcome.TIMEOUT]
    failure = (telling or failures)[-1]
    if len(failures) > 1:
        failure.detail += f" ({len(failures)} calls)"
    failure.cost = cost
    return failure


def _loop_time(moment: float) -> float:
    """A moment of the monotonic clock by the clock of the running loop."""
    return asyncio.get_running_loop().time() + moment - time.monotonic()
