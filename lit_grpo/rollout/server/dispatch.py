"""Distribute requests over the healthy servers, and retry the ones that fail.

Everything runs on the event loop of the supervisor, which starts and stops the servers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from lit_grpo.concurrency import backoff, gather_or_cancel
from lit_grpo.rollout.engine import EngineFailed
from lit_grpo.rollout.requests import Request, Sample
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.endpoint import RequestRefused, ServerError, in_words
from lit_grpo.rollout.server.server import Server

Deliver = Callable[[int, Sample | str], None]
"""Called with the index of a sample, and the sample or the reason why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Retries and concurrency of requests."""

    retries: int
    max_concurrency: int
    first_backoff: float = 0.5
    max_backoff: float = 30.0


class Dispatcher:
    """Send each request to the healthy server with the fewest running completions."""

    def __init__(self, servers: Sequence[Server], api: ServerAPI, limits: RequestLimits) -> None:
        self.num_retries = 0
        """Requests that were sent again."""
        self._servers = servers
        self._api = api
        self._limits = limits
        self._failure: EngineFailed | None = None
        self._waiting: deque[tuple[int, asyncio.Future[Server]]] = deque()

    async def sample(self, request: Request, deliver: Deliver) -> None:
        """Deliver every sample of a request, or the reason why there is none.

        Raises:
            EngineFailed: no server is left.
        """
        parts = self._api.split(request)
        if len(parts) == 1:
            await self._sample(parts[0], deliver)
        else:
            await gather_or_cancel([self._sample(part, deliver) for part in parts])

    @property
    def num_waiting(self) -> int:
        """Completions that wait for a server with room."""
        return sum(number for number, _ in self._waiting)

    def fail(self, failure: EngineFailed) -> None:
        """Raise the failure in all waiting and later requests: no server is left."""
        self._failure = failure
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(failure)

    async def _sample(self, request: Request, deliver: Deliver, num_failures: int = 0) -> None:
        """Send a request, and retry what it leaves unfinished.

        A failure counts against the request only if its server stays up: requests that were
        running on a server that died are retried without limit.
        """
        pending = dict(request.seeds)
        server = await self._acquire(len(pending))
        num_stops, problem = server.num_stops, ""

        def is_still_up() -> bool:
            return server.num_stops == num_stops and server.is_ready

        try:
            await self._stream(server, request, pending, deliver)
        except RequestRefused as error:
            problem = str(error)
            # A server that was restarted from outside refuses adapters that it no longer has.
            if await server.monitor.find_weight_problem() is None:
                _give_up(pending, problem, deliver)
        except ServerError as error:
            problem = in_words(error)
        if not pending:
            return
        if is_still_up():
            server.monitor.request_check()
        limits = self._limits
        await asyncio.sleep(backoff(num_failures + 1, limits.first_backoff, limits.max_backoff))
        if num_failures == limits.retries and is_still_up():
            await server.monitor.wait_until_checked()  # before the last failure is counted
        if is_still_up():
            num_failures += 1
        if num_failures > limits.retries:
            reason = f"{num_failures} attempts failed, the last one with: {problem}"
            _give_up(pending, reason, deliver)
            return
        self.num_retries += 1
        again = self._api.split(replace(request, seeds=pending))
        await gather_or_cancel([self._sample(part, deliver, num_failures) for part in again])

    async def _stream(
        self, server: Server, request: Request, pending: dict[int, int], deliver: Deliver
    ) -> None:
        """Deliver the samples that finish, and remove them from the pending ones."""
        clock = asyncio.get_running_loop().time
        load, current = server.load, server.weights.current
        assert current is not None, "a server that is ready has weights"
        request = replace(request, adapter=current.adapter)
        load.last_token_time = clock()
        try:
            with load.using(current.version), load.growing() as num_tokens:
                async with aclosing(self._api.stream(server.endpoint, request)) as stream:
                    async for index, sample in stream:
                        load.last_token_time = clock()
                        num_tokens[index] = len(sample.token_ids)
                        if sample.finish_reason is not None:
                            del num_tokens[index]
                            server.check_sample(sample, current.version)
                            del pending[index]
                            self._release(server, 1)
                            deliver(index, sample)
        finally:
            self._release(server, len(pending))

    async def _acquire(self, num_samples: int) -> Server:
        """Wait for a server with room for this many samples, first come, first served."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, future))
        self.assign_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result(), num_samples)
            raise

    def assign_waiting(self) -> None:
        """Assign waiting requests. Call this when a server becomes ready or less busy."""
        while self._waiting:
            num_samples, future = self._waiting[0]
            if future.done():  # cancelled
                self._waiting.popleft()
                continue
            ready = [server for server in self._servers if server.is_ready]
            server = min(ready, key=lambda one: one.load.num_running, default=None)
            if server is None or not self._has_room(server, num_samples):
                return
            self._waiting.popleft()
            server.load.num_running += num_samples
            future.set_result(server)

    def _has_room(self, server: Server, num_samples: int) -> bool:
        """Return whether the server can take the samples.

        An idle server always can, or a large group would wait forever.
        """
        num_running = server.load.num_running
        return not num_running or num_running + num_samples <= self._limits.max_concurrency

    def _release(self, server: Server, num_samples: int) -> None:
        server.load.num_running -= num_samples
        self.assign_waiting()


def _give_up(pending: dict[int, int], reason: str, deliver: Deliver) -> None:
    for index in pending:
        deliver(index, reason)
    pending.clear()
