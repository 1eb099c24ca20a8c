"""Send one question to a judge and read the reply, with retries and within the budget.

This is the only module that makes requests and retries them. A question that fails raises.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.concurrency import backoff, jitter
from lit_grpo.judge.budget import (
    RETRY_AFTER_JITTER,
    CallBudget,
    CallPermit,
    budget_of,
    deployment_of,
    release,
)
from lit_grpo.judge.config import Judge
from lit_grpo.judge.connection import connect, secret_variables, without_secret
from lit_grpo.judge.failures import JudgeFailure, as_failure, parsed
from lit_grpo.judge.ledger import Ledger, Usage
from lit_grpo.judge.reply import Form, Text, Verdict, read_reply
from lit_grpo.judge.spending import SpendingFile
from lit_grpo.types import Outcome, UserError
from lit_grpo.types.rollouts import Message

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0
CHARACTERS_PER_TOKEN = 4
MAX_PARSE_ERRORS = 3
"""Number of unreadable replies after which to give up on a question, since each costs money."""
COUNTED = {Outcome.RATE_LIMITED: "rate_limited", Outcome.PARSE_ERROR: "parse_errors"}
"""Outcomes of failed calls that the ledger counts, and the names of the counts."""
FIRST_REPLY_TOKENS = 256
"""Estimated length of a reply before the first one has arrived."""

PROBE = Form({"answer": Text()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt for the judge, and the form of the reply."""

    messages: Sequence[Message]
    form: Form
    ids: Sequence[str]
    """Ids of the items that need a verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswer:
    """The verdicts of one question."""

    verdicts: Mapping[str, Verdict]
    """id -> verdict, for the ids with exactly one."""
    cost: float
    """US dollars of all calls for the question."""


class JudgeClient:
    """A connection to a judge, bound to the event loop that uses it first.

    Raises:
        UserError: an address or a secret is missing, or the limits are too low for the number of
            processes or differ from another client's.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.ledger = Ledger()
        self._client = connect(judge)
        self.budget: CallBudget = budget_of(judge)
        self._uses_schema = judge.reply_format != "text"
        self._estimates_usage = False
        self._reply_tokens: float = min(FIRST_REPLY_TOKENS, judge.max_completion_tokens)

    def record_spending(self, run_dir: Path) -> None:
        """Keep what the judge costs in a directory of the run; every rank must call this."""
        file = SpendingFile(run_dir, deployment_of(self.judge), self.budget.rank)
        self.budget.record_in(file)

    async def close(self) -> None:
        release(self.budget)
        await self._client.close()

    async def check_access(self) -> None:
        """Ask one short question; failures other than denied access are only logged.

        Raises:
            UserError: access is denied (401, 403 or 404).
        """
        if self.budget.rank == 0:  # a judge that is down takes many seconds to say so
            log.info("asking judge %s a test question", self.judge.model)
        messages = [{"role": "user", "content": f"Are you ready? {PROBE.instructions(1)}"}]
        try:
            await self.ask(Question(messages=messages, form=PROBE, ids=["probe"]))
        except JudgeFailure as failure:
            if failure.is_access_error:
                raise UserError(self._explain_access_error(failure)) from None
            if failure.outcome is Outcome.BUDGET_SPENT:
                return  # the first question of a reward says so
            problem = "does not answer a test question yet"
            if failure.outcome is Outcome.PARSE_ERROR:
                problem = (
                    "answered a test question in another form than was asked for, which matters "
                    "only if it answers the questions of rewards like this, too"
                )
            log.warning("judge %s %s: %s", self.judge.model, problem, failure)

    def _explain_access_error(self, failure: JudgeFailure) -> str:
        judge = self.judge
        variables = " or ".join(secret_variables(judge))
        secret = {
            "key": f"the key in {variables}",
            "token": f"the token in {variables}",
            "none": "auth (none: no key is sent)",
        }
        return (
            f"the judge did not accept a test question: {self._client.base_url} answered "
            f"{failure.status} for model {judge.model!r}: {failure.detail}. Check model, base_url, "
            f"api ({judge.api}) or {secret.get(judge.auth, f'auth ({judge.auth})')}."
        )

    async def ask(self, question: Question) -> JudgeAnswer:
        """Ask a question, with retries, and return the verdicts.

        Raises:
            JudgeFailure: there was no readable reply within the retries and the deadline.
        """
        deadline = time.monotonic() + self.judge.limits.deadline_seconds
        costs: list[float] = []
        failures: list[JudgeFailure] = []
        while True:
            with_schema, permit = self._uses_schema, CallPermit()
            try:
                async with asyncio.timeout_at(_loop_time(deadline)) as timer:
                    verdicts = await self._call(question, with_schema, permit, costs)
                return JudgeAnswer(verdicts=verdicts, cost=sum(costs))
            except Exception as error:
                never_started = timer.expired() and not permit.is_given
                failure = permit.explain() if never_started else as_failure(error)
            if with_schema and failure.refuses_schema and self.judge.reply_format == "auto":
                self._stop_using_schema(failure)
                continue
            failures.append(failure)
            if permit.is_given and failure.outcome in COUNTED:
                self.ledger.count(COUNTED[failure.outcome])
            wait = _seconds_before_retry(failures, self.judge.limits.num_retries)
            if wait is None or time.monotonic() + wait > deadline:
                raise _most_informative(failures, sum(costs))
            self.ledger.count("retries")
            await asyncio.sleep(wait)

    async def _call(
        self, question: Question, with_schema: bool, permit: CallPermit, costs: list[float]
    ) -> Mapping[str, Verdict]:
        """Make one HTTP request and read the reply; count its waits and cost even if it fails."""
        request = self._request(question, with_schema)
        try:
            async with self.budget.slot(permit, self._expected_tokens(question)):
                completion = await self._send(request)
                costs.append(self._record_usage(question, completion, permit))
        finally:
            self.ledger.add_waits(permit.waited)
        return read_reply(_text_of(completion, self.judge), question.form, question.ids)

    async def _send(self, request: Mapping[str, Any]) -> Any:
        from openai._response import AsyncAPIResponse
        from openai.types.chat import ChatCompletion

        limit = self.judge.limits.call_timeout_seconds
        self.ledger.count("calls")
        start = time.monotonic()
        try:
            async with asyncio.timeout(limit) as timer:
                # As chat.completions.create, without its slow pass over all arguments.
                response = await self._client.post(
                    "/chat/completions",
                    body=dict(request),
                    cast_to=AsyncAPIResponse[ChatCompletion],
                )
                return await parsed(response)
        except Exception as error:
            if timer.expired():
                raise JudgeFailure(
                    Outcome.TIMEOUT,
                    f"no reply within {limit:g} s (limits.call_timeout_seconds)",
                    is_transient=True,
                ) from error
            failure = as_failure(error)
            failure.detail = without_secret(failure.detail, self.judge)
            if failure.retry_after:
                self.budget.hold_off(failure.retry_after)
            raise failure from None
        finally:
            self.ledger.sample("timing/judge_api_latency_s", time.monotonic() - start)

    def _request(self, question: Question, with_schema: bool) -> dict[str, Any]:
        judge = self.judge
        request: dict[str, Any] = {
            "model": judge.model,
            "messages": list(question.messages),
            "max_completion_tokens": judge.max_completion_tokens,
        }
        if judge.temperature is not None:
            request["temperature"] = judge.temperature
        if with_schema:
            schema = {
                "name": "verdicts",
                "strict": True,
                "schema": question.form.schema(len(question.ids)),
            }
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return request | dict(judge.extra_body or {})

    def _expected_tokens(self, question: Question) -> float:
        return _num_characters(question) / CHARACTERS_PER_TOKEN + self._reply_tokens

    def _record_usage(self, question: Question, completion: Any, permit: CallPermit) -> float:
        """Count the tokens and the cost of a reply, and return the cost."""
        usage = Usage.of(getattr(completion, "usage", None))
        if not usage.num_tokens:
            usage = self._estimate_usage(question, completion)
        cost = usage.cost(self.judge.price)
        self.ledger.add_usage(usage, cost)
        self.budget.spend(cost)
        permit.settle(usage.num_tokens)
        # A moving average of the replies so far is the estimate for the next one.
        self._reply_tokens += 0.1 * (usage.completion_tokens - self._reply_tokens)
        return cost

    def _estimate_usage(self, question: Question, completion: Any) -> Usage:
        """Estimate the tokens of a call from its texts: with a count of 0 no limit would hold."""
        if not self._estimates_usage:
            self._estimates_usage = True
            log.warning(
                "judge %s does not report the tokens of its replies (usage): tokens, cost and "
                "limits are based on an estimate of one token per %d characters",
                self.judge.model,
                CHARACTERS_PER_TOKEN,
            )
        try:
            reply = len(completion.choices[0].message.content)
        except (AttributeError, LookupError, TypeError):
            reply = 0
        return Usage(
            prompt_tokens=math.ceil(_num_characters(question) / CHARACTERS_PER_TOKEN),
            completion_tokens=math.ceil(reply / CHARACTERS_PER_TOKEN),
        )

    def _stop_using_schema(self, failure: JudgeFailure) -> None:
        if self._uses_schema:
            self._uses_schema = False
            log.info(
                "judge %s does not support JSON schemas (%s): from now on the prompt describes the "
                "reply. Set judge.reply_format to text to do so from the start.",
                self.judge.model,
                failure.detail,
            )


def _num_characters(question: Question) -> int:
    return sum(len(message["content"]) for message in question.messages)


def _text_of(completion: Any, judge: Judge) -> str:
    """Return the text of a reply.

    Raises:
        JudgeFailure: the reply is empty, cut off or filtered.
    """
    try:
        choice = completion.choices[0]
        content, refusal = choice.message.content, choice.message.refusal
    except (AttributeError, LookupError, TypeError):
        error = getattr(completion, "error", None)  # as routers answer for their providers
        outcome = Outcome.UNAVAILABLE if error else Outcome.PARSE_ERROR
        shown = repr(error or completion)[:200]
        if not error and getattr(completion, "choices", None) == []:
            shown = "it has no choices"
        raise JudgeFailure(outcome, f"not a chat completion: {shown}", is_transient=True) from None
    if choice.finish_reason == "length":
        raise JudgeFailure(
            Outcome.OUT_OF_TOKENS,
            f"the reply was cut off at max_completion_tokens {judge.max_completion_tokens}; "
            "a reasoning model spends them on its reasoning first",
        )
    if choice.finish_reason == "content_filter" or refusal:
        detail = refusal or "the reply was stopped by the content filter"
        raise JudgeFailure(Outcome.CONTENT_FILTERED, detail)
    if not content or not isinstance(content, str):
        why = f"the content must be text, got {content!r:.100}" if content else "an empty reply"
        raise JudgeFailure(Outcome.PARSE_ERROR, why, is_transient=True)
    return content


def _seconds_before_retry(failures: Sequence[JudgeFailure], num_retries: int) -> float | None:
    """Return how long to wait before the next call, or None to give up."""
    last = failures[-1]
    num_parse_errors = sum(one.outcome is Outcome.PARSE_ERROR for one in failures)
    if not last.is_transient or len(failures) > num_retries or num_parse_errors >= MAX_PARSE_ERRORS:
        return None
    if last.retry_after is not None:
        return last.retry_after + jitter.uniform(0, RETRY_AFTER_JITTER * max(1, last.retry_after))
    return backoff(len(failures), FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)


def _most_informative(failures: Sequence[JudgeFailure], cost: float) -> JudgeFailure:
    """Return the last failure that is not a timeout, else the last one."""
    others = [one for one in failures if one.outcome is not Outcome.TIMEOUT]
    failure = (others or failures)[-1]
    if len(failures) > 1:
        failure.detail += f" ({len(failures)} calls)"
    failure.cost = cost
    return failure


def _loop_time(moment: float) -> float:
    """Convert a time of the monotonic clock to the clock of the running loop."""
    return asyncio.get_running_loop().time() + moment - time.monotonic()
