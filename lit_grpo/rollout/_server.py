"""One inference server: its processes if they are ours, its address, its weights, its load.

Knows whether the server is well; what follows from that is the fleet's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from lit_grpo.rollout._dialect import Dialect, Sample, WeightUpdate, one_token_each
from lit_grpo.rollout._http import Endpoint, Refused, ServerTrouble
from lit_grpo.rollout._process import ServerProcess
from lit_grpo.rollout._proof import Expectation, prove
from lit_grpo.rollout._supervision import Supervision

log = logging.getLogger(__name__)

STARTUP_POLL_SECONDS = 0.3
SUSPICIOUS_POLL_SECONDS = 1.0
UPDATE_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The weights that every server should sample with, and what proves it."""

    update: WeightUpdate
    expectation: Expectation
    is_proof_due: bool
    versions_in_use: frozenset[int] = frozenset()
    """What requests of any rank began with and are not done with."""


class Server:
    """A server as the fleet sees it; everything here runs on one event loop.

    Args:
        start: Starts its processes; None for a server that somebody else runs.
        is_led: Somebody else gives it its weights, too.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect,
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
        self.update: WeightUpdate | None = None
        """The weights that it samples with."""
        self.users: Counter[int] = Counter()
        """Requests at work by the version that they began with."""
        self.log_tail = ""
        self._newest_version = -1
        self._dialect = dialect
        self._supervision = supervision
        self._request_timeout = request_timeout
        self._start = start
        self._is_led = is_led
        self._process: ServerProcess | None = None
        self._is_proven = False
        self._suspicion = asyncio.Event()
        self._doom = ""
        self._updating = asyncio.Lock()
        self.endpoint: Endpoint

    # Coming up

    async def come_up(self) -> None:
        """Returns when it answers.

        Raises:
            ServerTrouble: it ended, or took too long.
        """
        self.endpoint = Endpoint(self.url, self._request_timeout)
        self.update, self._is_proven, self._doom = None, False, ""
        self._retired: list[WeightUpdate] = []
        if self._start is not None:
            await self._launch(self._start)
        clock = asyncio.get_running_loop().time
        seconds = self._supervision.startup_timeout
        deadline = clock() + seconds
        while (problem := await self._startup_problem()) is not None:
            if self._has_ended:
                raise ServerTrouble("it ended before it answered")
            if clock() > deadline:
                raise ServerTrouble(f"it did not answer within {seconds:g} s ({problem})")
            await asyncio.sleep(STARTUP_POLL_SECONDS)

    async def _launch(self, start: Callable[[], ServerProcess]) -> None:
        starting = asyncio.create_task(asyncio.to_thread(start))
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting  # or nobody would end it
            raise

    async def _startup_problem(self) -> str | None:
        try:
            if self._start is None and not self._is_led:
                await self._dialect.recover(self.endpoint, self._supervision.health_timeout)
        except (ServerTrouble, Refused) as error:
            return str(error)
        return await self._health_problem()

    @property
    def _has_ended(self) -> bool:
        return self._process is not None and not self._process.is_running

    async def switch(self, target: Target) -> float | None:
        """Sample with the target's weights; returns the proof's difference if one was due.

        Raises:
            ServerTrouble, Refused: the update failed, and failed again.
            NotProven: it samples with others nevertheless.
        """
        async with self._updating:
            if self.update == target.update:
                return None
            self._newest_version = target.update.version
            if self._is_led:
                await self._until_updated(target.update)
                difference = None
            else:
                await self._update(target.update)
                difference = await self._prove(target)
            previous, self.update = self.update, target.update
        if previous is not None and previous.is_adapter and not self._is_led:
            self._retired.append(previous)
            await self._forget_unused(target.versions_in_use)
        return difference

    async def _forget_unused(self, in_use: frozenset[int]) -> None:
        """What still samples with an adapter goes on with it to its end; to the one before the
        last update another rank may be about to send a request."""
        in_use |= {version for version, number in self.users.items() if number}
        for update in [one for one in self._retired[:-1] if one.version not in in_use]:
            self._retired.remove(update)
            seconds = self._supervision.weight_sync_timeout
            await self._dialect.forget(self.endpoint, update, seconds)

    async def _prove(self, target: Target) -> float | None:
        if self._is_proven and not target.is_proof_due:
            return None
        adapter = target.update if target.update.is_adapter else None
        seconds = self._supervision.weight_sync_timeout
        try:
            async with asyncio.timeout(seconds):
                difference = await prove(self._dialect, self.endpoint, target.expectation, adapter)
        except TimeoutError:
            raise ServerTrouble(f"it could not be proven within {seconds:g} s") from None
        self._is_proven = True
        return difference

    async def _until_updated(self, update: WeightUpdate) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._supervision.weight_sync_timeout
        seconds = self._supervision.health_timeout
        while not self._may_have(
            await self._dialect.read_version(self.endpoint, seconds), update.version
        ):
            if clock() > deadline:
                raise ServerTrouble(f"it was not given version {update.version}")
            await asyncio.sleep(STARTUP_POLL_SECONDS)

    async def _update(self, update: WeightUpdate) -> None:
        """A failed update leaves the server paused, or half-way: repeated, it is whole again."""
        seconds = self._supervision.weight_sync_timeout
        for attempt in range(1, UPDATE_ATTEMPTS + 1):
            try:
                await self._dialect.update(self.endpoint, update, seconds)
                label = await self._dialect.read_version(self.endpoint, seconds)
            except (ServerTrouble, Refused) as error:
                if attempt == UPDATE_ATTEMPTS:
                    raise
                log.warning("%s: weight update failed, once more: %s", self.url, error)
            else:
                if label != str(update.version):
                    raise ServerTrouble(f"it has weights {label!r} after version {update.version}")
                return

    # Being watched

    def check(self, sample: Sample, first: WeightUpdate) -> None:
        """Refuse what lacks a logprob, and what other weights wrote than those that the server
        was given since the request.

        Raises:
            ServerTrouble
        """
        if not sample.is_whole:
            raise ServerTrouble("a completion lacks logprobs or versions of some of its tokens")
        labels = set(sample.versions)
        if strange := {one for one in labels if not self._may_have(one, first.version)}:
            self.condemn(f"it samples with weights {sorted(strange)}, not {first.version}")
            raise ServerTrouble(self._doom)

    def _may_have(self, label: str, oldest: int) -> bool:
        """Whether these are weights that it was given, since the oldest; of the newest ones the
        lead knows first."""
        if not label.isdecimal() or int(label) < oldest:
            return False
        return self._is_led or int(label) <= self._newest_version

    async def has_its_weights(self) -> bool:
        return await self._version_problem() is None

    def suspect(self) -> None:
        """Look at it now."""
        self._suspicion.set()

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
            if problem and failures >= self._supervision.unhealthy_after:
                return problem

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._suspicion.wait(), seconds)
        except TimeoutError:
            return
        self._suspicion.clear()

    async def _problem(self) -> str | None:
        if self._updating.locked():
            return None  # an update has a deadline of its own
        return (
            await self._health_problem()
            or await self._version_problem()
            or await self._silence_problem()
        )

    async def _health_problem(self) -> str | None:
        try:
            seconds = self._supervision.health_timeout
            await self._dialect.check_health(self.endpoint, seconds)
        except (ServerTrouble, Refused) as error:
            return str(error)
        return None

    async def _version_problem(self) -> str | None:
        """It may have been restarted behind our back, with the weights that it began with."""
        expected = self.update
        try:
            seconds = self._supervision.health_timeout
            label = await self._dialect.read_version(self.endpoint, seconds)
        except (ServerTrouble, Refused) as error:
            return str(error)
        is_old_news = self._updating.locked() or self.update != expected
        if is_old_news or expected is None or self._may_have(label, expected.version):
            return None
        self.condemn(f"it has weights {label!r}, not version {expected.version}")
        return self._doom

    async def _silence_problem(self) -> str | None:
        clock = asyncio.get_running_loop().time
        silence = clock() - self.last_news
        if not self.in_flight or silence < self._supervision.silence_timeout:
            return None
        adapter = self.update if self.update and self.update.is_adapter else None
        probe = one_token_each((0,), 1, 1.0, adapter)
        try:
            async with asyncio.timeout(self._supervision.health_timeout):
                async with aclosing(self._dialect.stream(self.endpoint, probe)) as stream:
                    async for _ in stream:
                        pass
        except (ServerTrouble, Refused, TimeoutError) as error:
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
        await self.endpoint.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.end)
            self.log_tail = self._process.log_tail()
            self._process = None
