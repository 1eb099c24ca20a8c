from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import openai
import pytest

from lit_grpo.judge.failures import (
    MAX_DETAIL_CHARACTERS,
    JudgeFailure,
    as_failure,
    retry_after_seconds,
)
from lit_grpo.types import Outcome


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_retry_after_is_read_from_either_header(headers, seconds):
    assert retry_after_seconds(headers) == seconds


def test_retry_after_may_be_a_date():
    then = datetime.now(UTC) + timedelta(seconds=100)
    seconds = retry_after_seconds({"retry-after": format_datetime(then, usegmt=True)})
    assert 90 < seconds <= 100


def test_a_failure_is_returned_unchanged():
    failure = JudgeFailure(Outcome.TIMEOUT, "late")
    assert as_failure(failure) is failure


def test_a_passed_deadline_is_a_timeout():
    failure = as_failure(TimeoutError())
    assert failure.outcome is Outcome.TIMEOUT
    assert "limits.deadline_seconds" in failure.detail


def test_any_other_exception_is_an_error_that_is_not_retried():
    failure = as_failure(AttributeError("no such thing"))
    assert failure.outcome is Outcome.ERROR
    assert not failure.is_transient
    assert failure.detail == "AttributeError: no such thing"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "the model is not loaded"}, "the model is not loaded"),
        ({"detail": [{"msg": "field required"}]}, "field required"),
    ],
)
def test_what_a_server_says_is_kept_in_whatever_form(body, said):
    response = httpx.Response(400, json=body, request=httpx.Request("POST", "http://judge"))
    client = openai.OpenAI(api_key="key", base_url="http://judge")
    failure = as_failure(client._make_status_error_from_response(response))
    assert failure.status == 400
    assert said in failure.detail


def test_a_long_detail_is_cut():
    assert len(JudgeFailure(Outcome.ERROR, "x" * 10_000).detail) == MAX_DETAIL_CHARACTERS


@pytest.mark.parametrize(
    ("status", "detail", "refuses"),
    [
        (400, "Unknown parameter: response_format", True),
        (400, "Invalid json_schema", True),
        (422, "structured output is not supported", True),
        (400, "the prompt is too long", False),
        (500, "response_format", False),
        (None, "response_format", False),
    ],
)
def test_a_rejected_schema_is_distinguished_from_other_errors(status, detail, refuses):
    assert JudgeFailure(Outcome.ERROR, detail, status=status).refuses_schema is refuses
