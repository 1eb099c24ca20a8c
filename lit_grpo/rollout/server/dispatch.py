"""Requests shared out over the servers that are well, and made again where one failed.

Runs on the fleet's event loop; brings no server up or down.
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
from lit_grpo.rollout.server.endpoint import RequestRefused, ServerError
from lit_grpo.rollout.server.server import Server

Deliver = Callable[[int, Sample | str], None]
"""Takes the number of a sample, and it or why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How requests are made."""

    retries: int
    max_concurrency: int
    first_backoff: float = 0.5
    max_backoff: float = 30.0


class Dispatcher:
    """Gives each request to the least busy server that is well."""

    def __init__(self, servers: Sequence[Server], api: ServerAPI, limits: RequestLimits) -> None:
        self.num_retries = 0
        """Requests that were made again."""
        self._servers = servers
        self._api = api
        self._limits = limits
        self._failure: EngineFailed | None = None
        self._waiting: deque[tuple[int, asyncio.Future[Server]]] = deque()

    def fail(self, failure: EngineFailed) -> None:
        """No server will ever be well again."""
        self._failure = failure
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(failure)

    # Samples

    async def sample(self, request: Request, deliver: Deliver) -> None:
        """Delivers every sample of a request, or why there is none.

        Raises:
            EngineFailed: no server is left.
        """
        parts = self._api.parts(request)
        if len(parts) == 1:
            await self._sample(parts[0], deliver)
        else:
            await gather_or_cancel([self._sample(part, deliver) for part in parts])

    async def _sample(self, request: Request, deliver: Deliver, failures: int = 0) -> None:
        left = dict(request.seeds)
        server = await self._acquire(len(left))
        life, trouble = server.life, ""

        def is_same() -> bool:
            return server.life == life and server.is_ready

        try:
            await self._stream(server, request, left, deliver)
        except RequestRefused as error:
            trouble = str(error)
            if await server.has_its_weights():  # else it was restarted, and knows no adapter
                self._refuse(left, trouble, deliver)
        except ServerError as error:
            trouble = str(error)
        if not left:
            return
        if is_same():
            server.suspect()
        limits = self._limits
        await asyncio.sleep(backoff(failures + 1, limits.first_backoff, limits.max_backoff))
        if failures == limits.retries and is_same():  # its last attempt: make sure
            await server.until_judged()
        if is_same():  # else it was not the request's fault
            failures += 1
        if failures > limits.retries:
            self._refuse(left, f"given up after {failures} attempts: {trouble}", deliver)
            return
        self.num_retries += 1
        again = self._api.parts(replace(request, seeds=left))
        await gather_or_cancel([self._sample(one, deliver, failures) for one in again])

    async def _stream(
        self, server: Server, request: Request, left: dict[int, int], deliver: Deliver
    ) -> None:
        clock = asyncio.get_running_loop().time
        first = server.weights.update
        assert first is not None
        request = replace(request, adapter=first.adapter)
        server.last_news = clock()
        server.users[first.version] += 1
        try:
            async with aclosing(self._api.stream(server.endpoint, request)) as stream:
                async for number, sample in stream:
                    server.last_news = clock()
                    if sample.finish_reason is not None:
                        server.check(sample, first.version)
                        del left[number]
                        self._release(server, 1)
                        deliver(number, sample)
        finally:
            server.users[first.version] -= 1
            self._release(server, len(left))

    def _refuse(self, left: dict[int, int], why: str, deliver: Deliver) -> None:
        for number in left:
            deliver(number, why)
        left.clear()

    # Sharing the servers out

    async def _acquire(self, num_samples: int) -> Server:
        """The least busy server that is well, in the order in which it is asked for."""
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, future))
        self.hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result(), num_samples)
            raise

    def hand_out(self) -> None:
        """Call it when a server has become well or less busy."""
        while self._waiting:
            num_samples, future = self._waiting[0]
            if future.done():  # cancelled
                self._waiting.popleft()
                continue
            ready = [server for server in self._servers if server.is_ready]
            server = min(ready, key=lambda one: one.in_flight, default=None)
            most = self._limits.max_concurrency
            if server is None or (server.in_flight and server.in_flight + num_samples > most):
                return
            self._waiting.popleft()
            server.in_flight += num_samples
            future.set_result(server)

    def _release(self, server: Server, num_samples: int) -> None:
        server.in_flight -= num_samples
        self.hand_out()
