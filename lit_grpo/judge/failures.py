"""Classify failures of a judge: the outcome of each, and whether a retry may help."""

from __future__ import annotations

import math
import re
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

from lit_grpo.types import Outcome

if TYPE_CHECKING:
    from openai import APIStatusError
    from openai._response import AsyncAPIResponse

MAX_DETAIL_CHARACTERS = 500
MAX_SHOWN_CHARACTERS = 60
"""Characters that are shown of a reply that is not JSON."""

HINTS = {
    401: "the key or token is wrong, expired, or for a different resource",
    403: "this key or identity may not use the deployment: on Azure it lacks the role 'Cognitive "
    "Services OpenAI User', or a network rule blocks this machine",
    404: "there is no such deployment or path under this base_url or, on Azure, with this api and "
    "api_version",
}
"""HTTP status -> cause, for the statuses that only a change of the configuration resolves."""

SCHEMA_WORDS = re.compile(r"response_format|json_schema|guided|structured output", re.IGNORECASE)


class JudgeFailure(Exception):
    """A question that got no verdict."""

    def __init__(
        self,
        outcome: Outcome,
        detail: str,
        *,
        is_transient: bool = False,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        self.outcome = outcome
        self.detail = detail[:MAX_DETAIL_CHARACTERS]
        self.is_transient = is_transient
        """Whether a retry of the same question may succeed."""
        self.retry_after = retry_after
        """Seconds that the server asks to wait."""
        self.status = status
        """HTTP status of the reply."""
        self.cost = 0.0
        """US dollars of the calls that led to the failure."""
        super().__init__()

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}"

    @property
    def is_access_error(self) -> bool:
        """Whether the server refuses access until the configuration or a permission changes."""
        return self.status in HINTS

    @property
    def refuses_schema(self) -> bool:
        """Whether the server rejects JSON schemas in general, not just this question."""
        return self.status in (400, 422) and bool(SCHEMA_WORDS.search(self.detail))


def as_failure(error: Exception) -> JudgeFailure:
    """Convert an exception of the openai package, or of a deadline, to a failure."""
    import openai

    if isinstance(error, JudgeFailure):
        return error
    if isinstance(error, TimeoutError | openai.APITimeoutError):
        detail = str(error) or "no reply within limits.deadline_seconds, waits included"
        return JudgeFailure(Outcome.TIMEOUT, detail, is_transient=True)
    if isinstance(error, openai.APIStatusError):
        return _from_status(error)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        url = error.request.url.copy_with(userinfo=b"", query=None)
        detail = f"no connection to {url} ({cause!r}; check that it is the base_url of the judge)"
        return JudgeFailure(Outcome.UNAVAILABLE, detail, is_transient=True)
    is_unreadable = isinstance(error, openai.APIResponseValidationError | ValueError)
    return JudgeFailure(
        Outcome.PARSE_ERROR if is_unreadable else Outcome.ERROR,
        f"{type(error).__name__}: {error}",
        is_transient=is_unreadable,
    )


async def parsed(response: AsyncAPIResponse[Any]) -> Any:
    """Return the parsed JSON of a successful reply.

    Raises:
        JudgeFailure: it is something else, which a proxy or a login page may have sent.
    """
    try:
        found = await response.parse()
    except ValueError:
        found = ""
    if not isinstance(found, str):  # the openai package returns what it does not parse as text
        return found
    raw = response.http_response
    kind = raw.headers.get("content-type", "no content type").partition(";")[0]
    text = raw.text.strip()
    shown = repr(text[:MAX_SHOWN_CHARACTERS]) if text else "an empty body"
    if text.startswith("{") and kind.endswith("json"):  # cut off; anything else is no reply at all
        detail = f"status {raw.status_code}, JSON that cannot be read: {shown}"
        raise JudgeFailure(Outcome.PARSE_ERROR, detail, is_transient=True)
    url = raw.url
    moved = f" from {url.scheme}://{url.netloc.decode()}{url.path}" if raw.history else ""
    detail = (
        f"not a chat completion: status {raw.status_code}{moved}, {kind}, {shown} (check base_url, "
        "which as a rule ends in /v1, and proxies)"
    )
    raise JudgeFailure(Outcome.UNAVAILABLE, detail, is_transient=True)


def _from_status(error: APIStatusError) -> JudgeFailure:
    status, detail = error.status_code, error.message
    if detail == f"Error code: {status}" and error.body:  # of another form than OpenAI's
        detail = f"{detail}: {error.body}"
    if status == 429:
        return JudgeFailure(
            Outcome.RATE_LIMITED,
            detail,
            is_transient=error.code != "insufficient_quota",
            retry_after=retry_after_seconds(error.response.headers),
            status=status,
        )
    if status >= 500:
        return JudgeFailure(
            Outcome.UNAVAILABLE,
            detail,
            is_transient=True,
            retry_after=retry_after_seconds(error.response.headers),
            status=status,
        )
    if status == 408:
        return JudgeFailure(Outcome.TIMEOUT, detail, is_transient=True, status=status)
    if error.code == "content_filter":
        return JudgeFailure(Outcome.CONTENT_FILTERED, detail, status=status)
    hint = f": {HINTS[status]}" if status in HINTS else ""
    return JudgeFailure(Outcome.ERROR, f"{detail}{hint}", status=status)


def retry_after_seconds(headers: Any) -> float | None:
    """Read ``retry-after-ms``, else ``retry-after`` (a number of seconds or an HTTP date)."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None or value is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        return None
    return None if number is None or not math.isfinite(number) else max(0.0, number)
