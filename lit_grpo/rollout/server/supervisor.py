"""Keep every server running with the latest weights: start, update, watch and restart them.

Everything runs on one event loop. The engine takes care of prompts and policies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from lit_grpo.concurrency import backoff
from lit_grpo.rollout.engine import EngineFailed
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.directory import FailureNote
from lit_grpo.rollout.server.dispatch import Dispatcher
from lit_grpo.rollout.server.endpoint import RequestRefused, ServerError, in_words
from lit_grpo.rollout.server.server import Server
from lit_grpo.rollout.server.weights import TargetWeights
from lit_grpo.rollout.weight_check import WeightMismatch

log = logging.getLogger(__name__)

STABLE_SECONDS = 3600.0
"""After a server has been ready for this long, its restarts are counted from 0 again."""
FAILURE_POLL_SECONDS = 1.0


class Supervisor:
    """Keep the servers of an engine running, healthy and up to date.

    Args:
        failure_note: Where rank 0 tells the other ranks that the engine has failed.
        is_rank_zero: Whether this rank restarts and updates the servers.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        dispatcher: Dispatcher,
        supervision: Supervision,
        failure_note: FailureNote,
        *,
        is_rank_zero: bool,
    ) -> None:
        self.servers = servers
        self.dispatcher = dispatcher
        self.num_restarts = 0
        self.check_differences: list[float] = []
        """Mean logprob difference of each weight check that passed."""
        self._supervision = supervision
        self._failure_note = failure_note
        self._is_rank_zero = is_rank_zero
        self._target: TargetWeights | None = None
        self._failure: EngineFailed | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all servers, without waiting for them."""
        self._tasks = [asyncio.create_task(self._supervise(server)) for server in self.servers]
        if not self._is_rank_zero:
            self._tasks.append(asyncio.create_task(self._follow_rank_zero()))

    async def close(self) -> None:
        """Stop all servers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def announce_version(self, version: int) -> set[int]:
        """Accept completions of this version from now on; return the versions in use by this rank.

        Every rank must have called it before any server is updated.
        """
        for server in self.servers:
            server.latest_version = version
        return set().union(*(server.versions_in_use for server in self.servers))

    async def update_weights(self, target: TargetWeights) -> None:
        """Update all ready servers; return when at least one has the new weights.

        Raises:
            EngineFailed: no server can be updated.
        """
        self._target = target
        self._notify()
        await asyncio.gather(*(self._update_ready(one) for one in self.servers if one.is_ready))
        while not any(self._is_up_to_date(server, target) for server in self.servers):
            self._raise_failure()
            await self._changed.wait()
        self._raise_failure()

    def _is_up_to_date(self, server: Server, target: TargetWeights) -> bool:
        return server.is_ready and server.weights.current == target.update

    async def _update_ready(self, server: Server) -> None:
        num_stops = server.num_stops
        try:
            await self._update(server)
        except WeightMismatch as error:
            self.fail(str(error))
        except (ServerError, RequestRefused) as error:
            if server.num_stops == num_stops:  # otherwise it is being restarted anyway
                server.mark_unhealthy(f"its weights could not be updated: {in_words(error)}")

    async def _update(self, server: Server) -> None:
        """Update a server to the latest target, which may change during an update."""
        while self._target is not None and server.weights.current != self._target.update:
            difference = await server.update_weights(self._target)
            if difference is not None:
                self.check_differences.append(difference)

    async def _supervise(self, server: Server) -> None:
        try:
            await self._keep_running(server)
        except Exception as error:
            log.exception("The supervision of %s failed.", server.url)
            self.fail(f"the supervision of {server.url} failed: {type(error).__name__}: {error}")

    async def _keep_running(self, server: Server) -> None:
        """Run a server, and restart it whenever it must be, until it is abandoned."""
        num_restarts = 0
        while True:
            reason = await self._run_once(server)
            if self._failure is not None:
                return
            num_restarts = 0 if server.seconds_ready > STABLE_SECONDS else num_restarts
            if num_restarts == self._supervision.max_restarts:
                self._abandon(server, reason)
                return
            num_restarts += 1
            await self._wait_before_restart(server, reason, num_restarts)

    async def _run_once(self, server: Server) -> str:
        """Start a server, use it until it is unhealthy, and stop it; return why."""
        try:
            await server.start()
            while self._target is None:
                await self._changed.wait()
            await self._update(server)
            log.info("Server %s is ready with version %d.", server.url, self._target.update.version)
            server.mark_ready()
            self._notify()
            return await server.monitor.wait_until_unhealthy()
        except (ServerError, RequestRefused, OSError) as error:
            return str(error)
        except WeightMismatch as error:
            self.fail(str(error))
            return str(error)
        finally:
            await server.stop()

    async def _wait_before_restart(self, server: Server, reason: str, number: int) -> None:
        supervision = self._supervision
        seconds = backoff(number, supervision.first_backoff, supervision.max_backoff)
        self.num_restarts += 1
        log.warning(
            "Server %s was stopped: %s. %s %d of %d in %.1f s.%s",
            server.url,
            reason,
            "Reconnection" if server.is_attached else "Restart",
            number,
            supervision.max_restarts,
            seconds,
            _log_excerpt(server),
        )
        await asyncio.sleep(seconds)

    def _abandon(self, server: Server, reason: str) -> None:
        server.is_abandoned = True
        done = "reconnected to" if server.is_attached else "restarted"
        message = (
            f"the inference server at {server.url} was {done} {self._supervision.max_restarts} "
            f"times in a row and is still unhealthy: {reason}.{server.requirements}"
            f"{_log_excerpt(server)}"
        )
        if all(one.is_abandoned for one in self.servers):
            self.fail(message)
        else:
            log.error("Continuing with the remaining servers: %s", message)

    def fail(self, message: str) -> None:
        """Stop all sampling, and raise ``EngineFailed`` in everything that waits."""
        if self._failure is not None:
            return
        self._failure = EngineFailed(message)
        for server in self.servers:
            server.mark_unhealthy("the engine has failed")
        self.dispatcher.fail(self._failure)
        self._notify()
        if self._is_rank_zero:
            self._failure_note.write(message)

    async def _follow_rank_zero(self) -> None:
        """Fail once rank 0 has reported a failure."""
        while self._failure is None:
            await asyncio.sleep(FAILURE_POLL_SECONDS)
            if message := self._failure_note.read():
                self.fail(message)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _notify(self) -> None:
        """Wake up everything that waits for a change of the servers or the target."""
        self.dispatcher.assign_waiting()
        self._changed.set()
        self._changed = asyncio.Event()


def _log_excerpt(server: Server) -> str:
    return f"\nThe end of its log:\n{server.log_tail}" if server.log_tail else ""
