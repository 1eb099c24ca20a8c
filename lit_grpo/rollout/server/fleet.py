"""The life of every server: up, synced, proven, watched, taken out, restarted.

Everything runs on one event loop. Knows neither prompts nor policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from lit_grpo.concurrency import backoff
from lit_grpo.rollout.engine import EngineFailed
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.dispatch import Dispatcher
from lit_grpo.rollout.server.endpoint import RequestRefused, ServerError
from lit_grpo.rollout.server.server import Server
from lit_grpo.rollout.server.server_weights import Target
from lit_grpo.rollout.weight_check import WeightMismatch

log = logging.getLogger(__name__)

GOOD_SERVICE_SECONDS = 3600.0
FAILURE_POLL_SECONDS = 1.0


class Fleet:
    """Keeps servers well, and their weights the newest.

    Args:
        failure_note: Where the lead says that it has given up, for the other ranks.
        is_lead: Whether this rank restarts and updates the servers.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        dispatcher: Dispatcher,
        supervision: Supervision,
        failure_note: Path,
        *,
        is_lead: bool,
    ) -> None:
        self.servers = servers
        self.dispatcher = dispatcher
        self.num_restarts = 0
        self.differences: list[float] = []
        """Of the proofs that passed."""
        self._supervision = supervision
        self._failure_note = failure_note
        self._is_lead = is_lead
        self._target: Target | None = None
        self._failure: EngineFailed | None = None
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    # The life of a server

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(server)) for server in self.servers]
        if not self._is_lead:
            self._keepers.append(asyncio.create_task(self._follow()))

    async def _follow(self) -> None:
        """Give up when the lead does."""
        while self._failure is None:
            await asyncio.sleep(FAILURE_POLL_SECONDS)
            if self._failure_note.exists() and (message := self._failure_note.read_text()):
                self.fail(message)

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, server: Server) -> None:
        try:
            await self._keep_up(server)
        except Exception as error:
            log.exception("The watch over %s has ended.", server.url)
            self.fail(f"the watch over {server.url} has ended: {type(error).__name__}: {error}")

    async def _keep_up(self, server: Server) -> None:
        restarts = 0
        while True:
            reason = await self._serve(server)
            if self._failure is not None:
                return
            restarts = 0 if server.seconds_of_service > GOOD_SERVICE_SECONDS else restarts
            if restarts == self._supervision.max_restarts:
                self._give_up(server, reason)
                return
            await self._pause(server, reason, restarts)
            restarts += 1

    async def _pause(self, server: Server, reason: str, restarts: int) -> None:
        policy = self._supervision
        seconds = backoff(restarts + 1, policy.first_backoff, policy.max_backoff)
        self.num_restarts += 1
        log.warning(
            "Server %s is taken out: %s. %s %d of %d in %.1f s.%s",
            server.url,
            reason,
            "Next look" if server.is_attached else "Restart",
            restarts + 1,
            policy.max_restarts,
            seconds,
            _quoted(server.log_tail),
        )
        await asyncio.sleep(seconds)

    async def _serve(self, server: Server) -> str:
        """From its start to its end; returns why it ended."""
        try:
            await server.come_up()
            while self._target is None:
                await self._next_change()
            await self._switch(server)
            log.info("Server %s serves version %d.", server.url, self._target.update.version)
            server.begin_service()
            self._change()
            return await server.until_unwell()
        except (ServerError, RequestRefused, OSError) as error:
            return str(error)
        except WeightMismatch as error:
            self.fail(str(error))
            return str(error)
        finally:
            await server.go_down()

    async def _switch(self, server: Server) -> None:
        """To the newest target, which may change meanwhile."""
        while self._target is not None and server.weights.update != self._target.update:
            difference = await server.switch(self._target)
            if difference is not None:
                self.differences.append(difference)

    def _give_up(self, server: Server, reason: str) -> None:
        server.has_given_up = True
        what_was_done = "looked for again" if server.is_attached else "restarted"
        message = (
            f"the inference server at {server.url} was {what_was_done} "
            f"{self._supervision.max_restarts} times in a row and is not well: {reason}."
            f"{server.advice}{_quoted(server.log_tail)}"
        )
        if all(one.has_given_up for one in self.servers):
            self.fail(message)
        else:
            log.error("Going on without a server: %s", message)

    def fail(self, message: str) -> None:
        """Nothing is sampled any more: whoever waits for a server gets this message."""
        if self._failure is not None:
            return
        self._failure = EngineFailed(message)
        for server in self.servers:
            server.condemn("the engine gave up")
        self.dispatcher.fail(self._failure)
        self._change()
        if self._is_lead:
            self._tell_the_others(message)

    def _tell_the_others(self, message: str) -> None:
        try:
            self._failure_note.parent.mkdir(parents=True, exist_ok=True)
            self._failure_note.write_text(message)
        except OSError as error:
            log.error("Other ranks are not told that the engine gave up: %s", error)

    # Weights

    async def expect_version(self, version: int) -> set[int]:
        """Servers may be given it from now on; returns what is in use: what the requests of this
        rank began with, and what servers are being given this moment.

        Every rank must have been told before any switches.
        """
        for server in self.servers:
            server.newest = version
        return set().union(*(server.versions_in_use for server in self.servers))

    async def switch(self, target: Target) -> None:
        """Every server that is well samples with these weights when this returns, one at least.

        Raises:
            EngineFailed: none does, and none will.
        """
        self._target = target
        self._change()
        await asyncio.gather(*(self._switch_ready(one) for one in self.servers if one.is_ready))
        while not any(one.is_ready and one.weights.update == target.update for one in self.servers):
            self._raise_failure()
            await self._next_change()
        self._raise_failure()

    async def _switch_ready(self, server: Server) -> None:
        life = server.life
        try:
            await self._switch(server)
        except WeightMismatch as error:
            self.fail(str(error))
        except (ServerError, RequestRefused) as error:
            if server.life == life:  # else it has been taken out meanwhile
                server.condemn(f"its weights could not be updated: {error}")

    # Waiting for each other

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def _change(self) -> None:
        self.dispatcher.hand_out()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _quoted(text: str) -> str:
    return f"\nThe end of its log:\n{text}" if text else ""
