"""Watch one running server, and report when it has to be restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from lit_grpo.rollout.requests import single_token_request
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.endpoint import (
    Endpoint,
    RequestRefused,
    ServerError,
    ServerUnreachable,
    in_words,
)
from lit_grpo.rollout.server.load import ServerLoad
from lit_grpo.rollout.server.weights import ServerWeights

RECHECK_SECONDS = 1.0
"""Interval after a failed check."""


class ServerHealth:
    """Check that a server reports that it is healthy, has the right weights, and makes progress.

    Args:
        has_exited: Returns whether the server's process has exited.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        api: ServerAPI,
        supervision: Supervision,
        weights: ServerWeights,
        load: ServerLoad,
        has_exited: Callable[[], bool],
    ) -> None:
        self._endpoint = endpoint
        self._api = api
        self._supervision = supervision
        self._weights = weights
        self._load = load
        self._has_exited = has_exited
        self._unhealthy_reason = ""
        self._check_requested = asyncio.Event()
        self._checked = asyncio.Event()

    def request_check(self) -> None:
        """Check the server now instead of after the interval."""
        self._checked.clear()
        self._check_requested.set()

    async def wait_until_checked(self) -> None:
        """Wait until a requested check has passed, or the server is stopped."""
        await self._checked.wait()

    def mark_unhealthy(self, reason: str) -> None:
        """Make ``wait_until_unhealthy`` return now."""
        self._unhealthy_reason = reason
        self._check_requested.set()

    @property
    def is_marked_unhealthy(self) -> bool:
        return bool(self._unhealthy_reason)

    def stop(self) -> None:
        """Make ``wait_until_checked`` return."""
        self._checked.set()

    async def wait_until_unhealthy(self) -> str:
        """Wait until the server must be restarted, and return the reason."""
        num_failures = 0
        while True:
            interval = self._supervision.health_interval
            await self._sleep(min(interval, RECHECK_SECONDS) if num_failures else interval)
            if self._unhealthy_reason:
                return self._unhealthy_reason
            if self._has_exited():
                return "its process exited"
            problem = await self._find_problem()
            num_failures = num_failures + 1 if problem else 0
            if not problem and not self._check_requested.is_set():
                self._checked.set()
            if problem and num_failures >= self._supervision.unhealthy_after:
                return problem

    async def _sleep(self, seconds: float) -> None:
        """Wait until the next check is due or requested."""
        try:
            await asyncio.wait_for(self._check_requested.wait(), seconds)
        except TimeoutError:
            return
        self._check_requested.clear()

    async def _find_problem(self) -> str | None:
        is_busy = self._weights.is_updating
        if error := await self.find_health_error(is_busy=is_busy):
            return in_words(error)
        if is_busy:  # an update has its own timeout, and may delay other replies
            return None
        return await self.find_weight_problem() or await self._find_hang()

    async def find_health_error(
        self, *, is_busy: bool = False
    ) -> ServerError | RequestRefused | None:
        """Return why the server is unhealthy, if it is.

        Args:
            is_busy: Whether the server is updating its weights; then only a refused connection
                counts as a problem.
        """
        try:
            await self._api.check_health(self._endpoint, self._supervision.health_timeout)
        except (ServerError, RequestRefused) as error:
            return None if is_busy and not isinstance(error, ServerUnreachable) else error
        return None

    async def find_weight_problem(self) -> str | None:
        """Return what is wrong with the server's weights, if anything.

        A server with wrong weights is marked unhealthy.
        """
        try:
            wrong = await self._weights.find_label_problem()
        except (ServerError, RequestRefused) as error:
            return in_words(error)
        if wrong is not None:
            self.mark_unhealthy(wrong)
        return wrong

    async def _find_hang(self) -> str | None:
        """Ask for one token if the server has requests and has been silent for too long."""
        clock = asyncio.get_running_loop().time
        silence = clock() - self._load.last_token_time
        if not self._load.num_running or silence < self._supervision.silence_timeout:
            return None
        current = self._weights.current
        probe = single_token_request((0,), 1, 1.0, current and current.adapter)
        try:
            async with asyncio.timeout(self._supervision.health_timeout):
                async with aclosing(self._api.stream(self._endpoint, probe)) as stream:
                    async for _ in stream:
                        pass
        except (ServerError, RequestRefused, TimeoutError) as error:
            self.mark_unhealthy(
                f"it hangs: no token from any of {self._load.num_running} completions for "
                f"{silence:.0f} s, and none from a one-token probe ({type(error).__name__})"
            )
            return self._unhealthy_reason
        self._load.last_token_time = clock()
        return None
