"""One inference server: its process, address, weights, health and load.

The supervisor decides when it is started, updated and stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lit_grpo.rollout.requests import Sample
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.endpoint import Endpoint, OtherProgram, RequestRefused, ServerError
from lit_grpo.rollout.server.health import ServerHealth
from lit_grpo.rollout.server.load import ServerLoad
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.server.weights import ServerWeights, TargetWeights

log = logging.getLogger(__name__)

STARTUP_POLL_SECONDS = 0.3


class Server:
    """One inference server, across restarts. Everything here runs on one event loop.

    Args:
        start_process: Starts its process; None if the process is started elsewhere.
        api_key: Key to send with every request; None for none.
        is_rank_zero: Whether this rank updates its weights.
    """

    endpoint: Endpoint
    weights: ServerWeights

    def __init__(
        self,
        url: str,
        api: ServerAPI,
        supervision: Supervision,
        request_timeout: float,
        start_process: Callable[[], ServerProcess] | None,
        *,
        api_key: str | None,
        is_rank_zero: bool,
    ) -> None:
        self.url = url
        self.load = ServerLoad()
        self.latest_version = -1
        """Version of the latest weights that any rank may have given it."""
        self.num_stops = 0
        """How often it was stopped; a change shows that requests sent before were aborted."""
        self.is_abandoned = False
        self.is_attached = start_process is None
        self.log_tail = ""
        """The end of its log when it was last stopped."""
        self.seconds_ready = 0.0
        """How long it was ready before it was last stopped."""
        self._api = api
        self._supervision = supervision
        self._request_timeout = request_timeout
        self._start_process = start_process
        self._api_key = api_key
        self._is_rank_zero = is_rank_zero
        self._process: ServerProcess | None = None
        self._monitor: ServerHealth | None = None
        self._ready_since: float | None = None

    async def start(self) -> None:
        """Start the process if it is launched here, and wait until the server is healthy.

        Raises:
            ServerError: it exited, or did not answer in time.
            RequestRefused: it was started without a required option.
            OSError: its process could not be started.
        """
        self.endpoint = Endpoint(self.url, self._request_timeout, self._api_key)
        self.weights = ServerWeights(
            self.endpoint,
            self._api,
            self._supervision,
            lambda: self.latest_version,
            is_rank_zero=self._is_rank_zero,
        )
        self._monitor = ServerHealth(
            self.endpoint,
            self._api,
            self._supervision,
            self.weights,
            self.load,
            self._has_exited,
        )
        if self._start_process is not None:
            await self._launch(self._start_process)
        await self._wait_until_healthy(self._monitor)
        if self._api_key is not None and self._is_rank_zero:
            await self._warn_if_open()

    async def _warn_if_open(self) -> None:
        """Warn if the endpoints that update weights answer without the key."""
        without_key = Endpoint(self.url, self._request_timeout)
        try:
            await self._api.read_version(without_key, self._supervision.health_timeout)
        except (RequestRefused, ServerError):
            return
        finally:
            await without_key.close()
        log.warning(
            "%s has an API key, but answers requests about its weights without it: whoever can "
            "reach it can make it execute code. See 'Who may reach a server' in docs/engines.md.",
            self.url,
        )

    async def _launch(self, start_process: Callable[[], ServerProcess]) -> None:
        def launch() -> None:
            self._process = start_process()

        await _in_thread(launch)

    def _has_exited(self) -> bool:
        return self._process is not None and not self._process.is_running

    async def _wait_until_healthy(self, monitor: ServerHealth) -> None:
        seconds = self._supervision.startup_timeout
        deadline = _now() + seconds
        while (problem := await self._find_startup_problem(monitor)) is not None:
            if isinstance(problem, OtherProgram):
                raise problem
            if self._has_exited():
                raise ServerError("it exited before it answered")
            if _now() > deadline:
                raise ServerError(f"it did not answer within {seconds:g} s ({problem})")
            await asyncio.sleep(STARTUP_POLL_SECONDS)

    async def _find_startup_problem(
        self, monitor: ServerHealth
    ) -> ServerError | RequestRefused | None:
        try:
            if self.is_attached and self._is_rank_zero:
                await self._api.recover(self.endpoint, self._supervision.health_timeout)
        except ServerError as error:
            return error
        return await monitor.find_health_error()

    async def stop(self) -> None:
        """Abort its requests, and end its process if it was launched here."""
        self.seconds_ready = _now() - self._ready_since if self._ready_since is not None else 0.0
        self._ready_since = None
        self.num_stops += 1
        if self._monitor is not None:
            self._monitor.stop()
        try:
            await self.endpoint.close()
        finally:
            if (process := self._process) is not None:
                self._process = None
                await _in_thread(process.stop)
                self.log_tail = process.log_tail()

    def mark_ready(self) -> None:
        """Mark the server ready for requests: it is healthy and has the current weights."""
        self._ready_since = _now()

    def mark_unhealthy(self, reason: str) -> None:
        """Stop sending requests to the server, and make the supervisor restart it now."""
        if self._monitor is not None:
            self._monitor.mark_unhealthy(reason)

    @property
    def is_ready(self) -> bool:
        return self._ready_since is not None and not self.monitor.is_marked_unhealthy

    @property
    def monitor(self) -> ServerHealth:
        assert self._monitor is not None, "the server has not been started"
        return self._monitor

    @property
    def requirements(self) -> str:
        """A sentence on how it must be started; empty if it is launched here."""
        if not self.is_attached:
            return ""
        return f" A server that is not launched by the run needs {self._api.requirements}."

    @property
    def versions_in_use(self) -> set[int]:
        return self.load.versions_in_use

    async def update_weights(self, target: TargetWeights) -> float | None:
        """Update to the target's weights; return the mean difference if they were checked.

        Raises:
            ServerError, RequestRefused: the update failed twice.
            WeightMismatch: the server does not sample from these weights.
        """
        with self.load.using(target.update.version):
            difference = await self.weights.update(target)
        await self.weights.unload_unused(target.versions_in_use | self.versions_in_use)
        return difference

    def check_sample(self, sample: Sample, oldest_version: int) -> None:
        """Check that a finished completion is complete and comes from known weights.

        Args:
            oldest_version: The version that its request started with.

        Raises:
            ServerError
        """
        if not sample.is_complete:
            raise ServerError("a completion lacks logprobs or versions of some of its tokens")
        if problem := self.weights.find_sample_problem(set(sample.versions), oldest_version):
            self.mark_unhealthy(problem)
            raise ServerError(problem)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _in_thread(function: Callable[[], None]) -> None:
    """Run a blocking function in a thread, to its end even if this task is cancelled."""
    running = asyncio.create_task(asyncio.to_thread(function))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await running
        raise
