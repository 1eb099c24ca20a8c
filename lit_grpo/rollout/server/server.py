"""One inference server: its processes if they are ours, its address, its load.

Knows whether the server is well; what follows from that is the fleet's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing

from lit_grpo.rollout.requests import Sample, one_token_each
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.endpoint import (
    Endpoint,
    RequestRefused,
    ServerError,
    ServerUnreachable,
)
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.server.server_weights import ServerWeights, Target

STARTUP_POLL_SECONDS = 0.3
SUSPICIOUS_POLL_SECONDS = 1.0


class Server:
    """A server as the fleet sees it; everything here runs on one event loop.

    Args:
        start: Starts its processes; None for a server that somebody else runs.
        is_led: Somebody else gives it its weights, too.
    """

    def __init__(
        self,
        url: str,
        api: ServerAPI,
        supervision: Supervision,
        request_timeout: float,
        start: Callable[[], ServerProcess] | None,
        *,
        is_led: bool,
    ) -> None:
        self.url = url
        self.is_ready = False
        self.has_given_up = False
        self.in_flight = 0
        """Completions that it is at."""
        self.last_news = 0.0
        self.life = 0
        """How often it has been taken out."""
        self.users: Counter[int] = Counter()
        """Requests at work by the version that they began with, and updates by theirs."""
        self.newest = -1
        """Version of the last weights that it may have been given, by whatever rank."""
        self.log_tail = ""
        self.is_attached = start is None
        """Somebody else runs it, or another rank."""
        self._served_since = float("inf")
        self._api = api
        self._supervision = supervision
        self._request_timeout = request_timeout
        self._start = start
        self._is_led = is_led
        self._process: ServerProcess | None = None
        self._suspicion = asyncio.Event()
        self._judged = asyncio.Event()
        self._doom = ""
        self.endpoint: Endpoint
        self.weights: ServerWeights
        """What it holds since it came up."""

    # Coming up

    async def come_up(self) -> None:
        """Returns when it answers.

        Raises:
            ServerError: it ended, or took too long.
            RequestRefused: it lacks what it should have been started with.
        """
        self.endpoint = Endpoint(self.url, self._request_timeout)
        self.weights = ServerWeights(
            self.endpoint,
            self._api,
            self._supervision,
            lambda: self.newest,
            is_led=self._is_led,
        )
        self._doom = ""
        self._served_since = float("inf")
        if self._start is not None:
            await self._launch(self._start)
        clock = asyncio.get_running_loop().time
        seconds = self._supervision.startup_timeout
        deadline = clock() + seconds
        while (problem := await self._startup_problem()) is not None:
            if self._has_ended:
                raise ServerError("it ended before it answered")
            if clock() > deadline:
                raise ServerError(f"it did not answer within {seconds:g} s ({problem})")
            await asyncio.sleep(STARTUP_POLL_SECONDS)

    async def _launch(self, start: Callable[[], ServerProcess]) -> None:
        def launch() -> None:
            self._process = start()

        await _to_its_end(launch)

    async def _startup_problem(self) -> str | None:
        try:
            if self.is_attached and not self._is_led:
                await self._api.recover(self.endpoint, self._supervision.health_timeout)
        except ServerError as error:
            return str(error)
        return await self._health_problem()

    @property
    def _has_ended(self) -> bool:
        return self._process is not None and not self._process.is_running

    async def switch(self, target: Target) -> float | None:
        """Sample with the target's weights; returns the proof's difference if one was due.

        Raises:
            ServerError, RequestRefused: the update failed, and failed again.
            WeightMismatch: it samples with others nevertheless.
        """
        version = target.update.version
        self.users[version] += 1  # its files must stay
        try:
            difference = await self.weights.switch(target)
        finally:
            self.users[version] -= 1
        await self.weights.forget_unused(target.versions_in_use | self.versions_in_use)
        return difference

    @property
    def versions_in_use(self) -> set[int]:
        """What requests of this rank began with and are not done with, and what it is given."""
        return {version for version, number in self.users.items() if number}

    def begin_service(self) -> None:
        """It is up, and has its weights."""
        self.is_ready = True
        self._served_since = asyncio.get_running_loop().time()

    @property
    def seconds_of_service(self) -> float:
        """Since it began; less than 0 where it did not get so far."""
        return asyncio.get_running_loop().time() - self._served_since

    @property
    def advice(self) -> str:
        """What whoever runs it should look at; empty for one that is launched here."""
        return f" Such a server needs {self._api.needs}." if self.is_attached else ""

    # Being watched

    def check(self, sample: Sample, oldest: int) -> None:
        """Refuse what lacks a logprob, and what other weights wrote than those that the server
        was given since the version that the request began with.

        Raises:
            ServerError
        """
        if not sample.is_whole:
            raise ServerError("a completion lacks logprobs or versions of some of its tokens")
        if strange := self.weights.find_strange(set(sample.versions), oldest):
            self.condemn(strange)
            raise ServerError(strange)

    async def has_its_weights(self) -> bool:
        return await self._version_problem() is None

    def suspect(self) -> None:
        """Look at it now."""
        self._judged.clear()
        self._suspicion.set()

    async def until_judged(self) -> None:
        """Returns when it has been looked at since the last suspicion, and found well or taken
        out."""
        await self._judged.wait()

    def condemn(self, reason: str) -> None:
        """Take it out now."""
        self.is_ready = False
        self._doom = reason
        self._suspicion.set()

    async def until_unwell(self) -> str:
        """Why it has to be taken out."""
        failures = 0
        while True:
            interval = self._supervision.health_interval
            await self._wait(min(interval, SUSPICIOUS_POLL_SECONDS) if failures else interval)
            if self._doom:
                return self._doom
            if self._has_ended:
                return "its process ended"
            problem = await self._problem()
            failures = failures + 1 if problem else 0
            if not problem and not self._suspicion.is_set():
                self._judged.set()
            if problem and failures >= self._supervision.unhealthy_after:
                return problem

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._suspicion.wait(), seconds)
        except TimeoutError:
            return
        self._suspicion.clear()

    async def _problem(self) -> str | None:
        if self.weights.is_changing:  # which has a deadline of its own, and keeps a server busy
            return await self._health_problem(must_be_there=True)
        return (
            await self._health_problem()
            or await self._version_problem()
            or await self._silence_problem()
        )

    async def _health_problem(self, *, must_be_there: bool = False) -> str | None:
        try:
            seconds = self._supervision.health_timeout
            await self._api.check_health(self.endpoint, seconds)
        except (ServerError, RequestRefused) as error:
            return (
                None if must_be_there and not isinstance(error, ServerUnreachable) else str(error)
            )
        return None

    async def _version_problem(self) -> str | None:
        try:
            wrong = await self.weights.find_wrong()
        except (ServerError, RequestRefused) as error:
            return str(error)
        if wrong is not None:
            self.condemn(wrong)
        return wrong

    async def _silence_problem(self) -> str | None:
        clock = asyncio.get_running_loop().time
        silence = clock() - self.last_news
        if not self.in_flight or silence < self._supervision.silence_timeout:
            return None
        update = self.weights.update
        probe = one_token_each((0,), 1, 1.0, update and update.adapter)
        try:
            async with asyncio.timeout(self._supervision.health_timeout):
                async with aclosing(self._api.stream(self.endpoint, probe)) as stream:
                    async for _ in stream:
                        pass
        except (ServerError, RequestRefused, TimeoutError) as error:
            self.condemn(
                f"it hangs: {self.in_flight} completions and no word for {silence:.0f} s, nor a "
                f"token for a request of one ({type(error).__name__})"
            )
            return self._doom
        self.last_news = clock()
        return None

    # Going down

    async def go_down(self) -> None:
        """End its processes; what was asked of it breaks off."""
        self.is_ready = False
        self.life += 1
        self._suspicion.clear()
        self._judged.set()
        try:
            await self.endpoint.close()
        finally:
            if (process := self._process) is not None:
                self._process = None
                await _to_its_end(process.end)
                self.log_tail = process.log_tail()


async def _to_its_end(function: Callable[[], None]) -> None:
    """Run it in a thread; who is cancelled meanwhile is so after it."""
    running = asyncio.create_task(asyncio.to_thread(function))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise
