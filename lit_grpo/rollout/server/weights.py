"""The weights of one server: update them, check them, and compare the labels that it reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from contextlib import aclosing
from dataclasses import dataclass, replace

from torch import Tensor

from lit_grpo.concurrency import gather_or_cancel
from lit_grpo.rollout.requests import Request
from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.endpoint import Endpoint, RequestRefused, ServerError, in_words
from lit_grpo.rollout.weight_check import ExpectedLogprobs, check_logprobs, logprob_pair
from lit_grpo.rollout.weights.store import WeightUpdate

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
MAX_UPDATE_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWeights:
    """The weights that every server should sample with, and how to check them."""

    update: WeightUpdate
    expected: ExpectedLogprobs
    is_check_due: bool
    versions_in_use: frozenset[int] = frozenset()
    """Versions that unfinished requests of any rank started with."""


class ServerWeights:
    """The weights that a server has loaded since it started.

    Args:
        latest_version: Returns the latest version that any rank may have given it.
        is_rank_zero: Whether this rank updates the server; the others wait until it is updated.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        api: ServerAPI,
        supervision: Supervision,
        latest_version: Callable[[], int],
        *,
        is_rank_zero: bool,
    ) -> None:
        self.current: WeightUpdate | None = None
        """The last update; None for the weights that it was started with."""
        self._endpoint = endpoint
        self._api = api
        self._supervision = supervision
        self._latest_version = latest_version
        self._is_rank_zero = is_rank_zero
        self._is_checked = False
        self._old_adapters: list[WeightUpdate] = []
        self._lock = asyncio.Lock()

    @property
    def is_updating(self) -> bool:
        return self._lock.locked()

    async def update(self, target: TargetWeights) -> float | None:
        """Update to the target's weights; return the mean difference if they were checked.

        Raises:
            ServerError, RequestRefused: the update failed twice.
            WeightMismatch: the server does not sample from these weights.
        """
        async with self._lock:
            if self.current == target.update:
                return None
            if self._is_rank_zero:
                await self._send(target.update)
                difference = await self._check_if_due(target)
            else:
                await self._wait_for(target.update)
                difference = None
            # Drop the copy of the weights, so that only the latest target holds one.
            previous, self.current = self.current, replace(target.update, host_weights=None)
        if previous is not None and previous.is_adapter and self._is_rank_zero:
            self._old_adapters.append(previous)
        return difference

    async def unload_unused(self, in_use: Set[int]) -> None:
        """Unload adapters that no request uses.

        The latest unused one is kept: another rank may be about to send a request for it.
        """
        for update in [one for one in self._old_adapters[:-1] if one.version not in in_use]:
            self._old_adapters.remove(update)
            seconds = self._supervision.weight_sync_timeout
            await self._api.unload_adapter(self._endpoint, update, seconds)

    async def _send(self, update: WeightUpdate) -> None:
        """Update, and try again once: a failed update leaves the server paused or half updated."""
        seconds = self._supervision.weight_sync_timeout
        for attempt in range(1, MAX_UPDATE_ATTEMPTS + 1):
            try:
                await self._api.update_weights(self._endpoint, update, seconds)
                label = await self._api.read_version(self._endpoint, seconds)
            except (ServerError, RequestRefused) as error:
                self._is_checked = False
                if attempt == MAX_UPDATE_ATTEMPTS:
                    raise
                why, url = in_words(error), self._endpoint.url
                log.warning("%s: the weight update failed, retrying: %s", url, why)
            else:
                if label != str(update.version):
                    raise ServerError(
                        f"it reports weights {label!r} after an update to version {update.version}"
                    )
                return

    async def _wait_for(self, update: WeightUpdate) -> None:
        """Wait until rank 0 has updated the server."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._supervision.weight_sync_timeout
        while not self._is_known(await self._read_label(), update.version):
            if clock() > deadline:
                raise ServerError(f"rank 0 did not give it version {update.version}")
            await asyncio.sleep(POLL_SECONDS)

    async def _read_label(self) -> str:
        return await self._api.read_version(self._endpoint, self._supervision.health_timeout)

    async def _check_if_due(self, target: TargetWeights) -> float | None:
        if self._is_checked and not target.is_check_due:
            return None
        seconds = self._supervision.weight_sync_timeout
        try:
            async with asyncio.timeout(seconds):
                difference = await self._check(target)
        except TimeoutError:
            raise ServerError(f"the check of its weights took longer than {seconds:g} s") from None
        self._is_checked = True
        return difference

    async def _check(self, target: TargetWeights) -> float:
        """Return the mean difference of the server's logprobs from the trainer's."""

        async def compare(request: Request, expected: Tensor) -> list[tuple[float, float]]:
            pairs = {}
            async with aclosing(self._api.stream(self._endpoint, request)) as stream:
                async for index, sample in stream:
                    if sample.finish_reason is None:
                        continue
                    if not sample.is_complete:
                        raise ServerError("a token to compare has no logprob or no version")
                    pairs[index] = logprob_pair(sample, expected)
            return list(pairs.values())

        answers = await gather_or_cancel(
            [
                compare(part, expected)
                for request, expected in target.expected.probes(target.update.adapter)
                for part in self._api.split(request)
            ]
        )
        pairs = [pair for answer in answers for pair in answer]
        return check_logprobs(pairs, target.expected, f"the server at {self._endpoint.url}")

    async def find_label_problem(self) -> str | None:
        """Return what is wrong with the reported label, if anything.

        The server may have been restarted from outside, which resets it to the weights that it
        starts with.

        Raises:
            ServerError, RequestRefused: the label could not be read.
        """
        expected = self.current
        label = await self._read_label()
        is_outdated = self.is_updating or self.current != expected
        if is_outdated or expected is None or self._is_known(label, expected.version):
            return None
        return f"it reports weights {label!r}, not version {expected.version}"

    def find_sample_problem(self, labels: set[str], oldest_version: int) -> str | None:
        """Return what is wrong with the labels of a completion's tokens, if anything.

        Args:
            oldest_version: The version that its request started with.
        """
        unknown = sorted(label for label in labels if not self._is_known(label, oldest_version))
        return f"it samples with weights {unknown}, not {oldest_version}" if unknown else None

    def _is_known(self, label: str, oldest_version: int) -> bool:
        """Return whether the label is a version from the oldest to the latest one given to it."""
        return label.isdecimal() and oldest_version <= int(label) <= self._latest_version()
