"""Why a judge gave no verdict: each way an outcome, and whether asking again may help."""

from __future__ import annotations

import math
import re
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

from lit_grpo.types import Outcome

if TYPE_CHECKING:
    from openai import APIStatusError

MAX_DETAIL_CHARACTERS = 500

HINTS = {
    401: "the key or token is wrong, expired, or of another resource",
    403: "this key or identity may not use the deployment: on Azure it lacks the role 'Cognitive "
    "Services OpenAI User', or a network rule keeps this machine out",
    404: "there is no such deployment or path: check model, base_url and, on Azure, api and "
    "api_version",
}
"""What is wrong by status, for the statuses that no waiting mends."""

SCHEMA_WORDS = re.compile(r"response_format|json_schema|guided|structured output", re.IGNORECASE)


class JudgeFailure(Exception):
    """A question without a verdict."""

    def __init__(
        self,
        outcome: Outcome,
        detail: str,
        *,
        may_pass: bool = False,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        self.outcome = outcome
        self.detail = detail[:MAX_DETAIL_CHARACTERS]
        self.may_pass = may_pass
        """Whether the same question may be answered a little later."""
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""
        self.status = status
        self.cost = 0.0
        """US dollars of the calls that led to it."""
        super().__init__()

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}"

    @property
    def is_access(self) -> bool:
        """Whether the judge refuses us for a reason that a person has to remove."""
        return self.status in HINTS

    @property
    def refuses_schema(self) -> bool:
        """Whether the server knows no reply schemas, rather than a fault of the question."""
        return self.status in (400, 422) and bool(SCHEMA_WORDS.search(self.detail))


def as_failure(error: Exception) -> JudgeFailure:
    """What an exception of the openai package, or of a deadline, means."""
    import openai

    if isinstance(error, JudgeFailure):
        return error
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        detail = str(error) or "no reply within limits.deadline_seconds, waits included"
        return JudgeFailure(Outcome.TIMEOUT, detail, may_pass=True)
    if isinstance(error, openai.APIStatusError):
        return _of_status(error)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        return JudgeFailure(Outcome.UNAVAILABLE, f"{error} ({cause!r})", may_pass=True)
    unreadable = isinstance(error, openai.APIResponseValidationError | ValueError)
    return JudgeFailure(
        Outcome.PARSE_ERROR if unreadable else Outcome.ERROR,
        f"{type(error).__name__}: {error}",
        may_pass=unreadable,
    )


def _of_status(error: APIStatusError) -> JudgeFailure:
    status, detail = error.status_code, error.message
    settings: dict[str, Any] = {"status": status}
    if status == 429:
        settings |= {"may_pass": error.code != "insufficient_quota"}
        settings |= {"retry_after": retry_after_seconds(error.response.headers)}
        return JudgeFailure(Outcome.RATE_LIMITED, detail, **settings)
    if status >= 500:
        settings |= {"retry_after": retry_after_seconds(error.response.headers)}
        return JudgeFailure(Outcome.UNAVAILABLE, detail, may_pass=True, **settings)
    if status == 408:
        return JudgeFailure(Outcome.TIMEOUT, detail, may_pass=True, **settings)
    if error.code == "content_filter":
        return JudgeFailure(Outcome.CONTENT_FILTERED, detail, **settings)
    hint = f": {HINTS[status]}" if status in HINTS else ""
    return JudgeFailure(Outcome.ERROR, f"{detail}{hint}", **settings)


def retry_after_seconds(headers: Any) -> float | None:
    """Seconds to wait by ``retry-after-ms`` or ``retry-after`` (a number or an HTTP date)."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return seconds
    try:
        return (
            None if value is None else max(0.0, parsedate_to_datetime(value).timestamp() - time())
        )
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        return None
    return None if number is None or not math.isfinite(number) else max(0.0, number)
