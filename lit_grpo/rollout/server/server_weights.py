"""The weights that one server samples with: given to it, proven, checked.

Knows neither processes nor load; what follows from wrong weights is the server's affair.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from lit_grpo.rollout.server.api import ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.endpoint import Endpoint, RequestRefused, ServerError
from lit_grpo.rollout.weight_check import ExpectedLogprobs, prove
from lit_grpo.rollout.weights.store import WeightUpdate

log = logging.getLogger(__name__)

LEAD_POLL_SECONDS = 0.3
UPDATE_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The weights that every server should sample with, and what proves it."""

    update: WeightUpdate
    expectation: ExpectedLogprobs
    is_proof_due: bool
    versions_in_use: frozenset[int] = frozenset()
    """What requests of any rank began with and are not done with."""


class ServerWeights:
    """What a server that has come up holds.

    Args:
        newest: Version of the last weights that it may have been given.
        is_led: Another rank gives the server its weights; here they are waited for.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        api: ServerAPI,
        supervision: Supervision,
        newest: Callable[[], int],
        *,
        is_led: bool,
    ) -> None:
        self.update: WeightUpdate | None = None
        """The last one; None for those that it began with."""
        self._endpoint = endpoint
        self._api = api
        self._supervision = supervision
        self._newest = newest
        self._is_led = is_led
        self._is_proven = False
        self._retired: list[WeightUpdate] = []
        self._updating = asyncio.Lock()

    # Given

    async def switch(self, target: Target) -> float | None:
        """Sample with the target's weights; returns the proof's difference if one was due.

        Raises:
            ServerError, RequestRefused: the update failed, and failed again.
            WeightMismatch: it samples with others nevertheless.
        """
        async with self._updating:
            if self.update == target.update:
                return None
            if self._is_led:
                await self._until_updated(target.update)
                difference = None
            else:
                await self._update(target.update)
                difference = await self._prove(target)
            # Without the copies of the weights: they are the newest target's alone.
            previous, self.update = self.update, replace(target.update, weights=None)
        if previous is not None and previous.is_adapter and not self._is_led:
            self._retired.append(previous)
        return difference

    async def forget_unused(self, in_use: Set[int]) -> None:
        """Drop old adapters. What still samples with one goes on with it to its end; to the one
        before the last update another rank may be about to send a request."""
        for update in [one for one in self._retired[:-1] if one.version not in in_use]:
            self._retired.remove(update)
            seconds = self._supervision.weight_sync_timeout
            await self._api.forget(self._endpoint, update, seconds)

    @property
    def is_changing(self) -> bool:
        return self._updating.locked()

    async def _update(self, update: WeightUpdate) -> None:
        """A failed update leaves the server paused, or half-way: repeated, it is whole again."""
        seconds = self._supervision.weight_sync_timeout
        for attempt in range(1, UPDATE_ATTEMPTS + 1):
            try:
                await self._api.update(self._endpoint, update, seconds)
                label = await self._api.read_version(self._endpoint, seconds)
            except (ServerError, RequestRefused) as error:
                self._is_proven = False  # half of them may have arrived
                if attempt == UPDATE_ATTEMPTS:
                    raise
                log.warning("%s: weight update failed, once more: %s", self._endpoint.url, error)
            else:
                if label != str(update.version):
                    raise ServerError(f"it has weights {label!r} after version {update.version}")
                return

    async def _until_updated(self, update: WeightUpdate) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._supervision.weight_sync_timeout
        while not self._may_be(await self._label(), update.version):
            if clock() > deadline:
                raise ServerError(f"it was not given version {update.version}")
            await asyncio.sleep(LEAD_POLL_SECONDS)

    async def _label(self) -> str:
        return await self._api.read_version(self._endpoint, self._supervision.health_timeout)

    # Proven

    async def _prove(self, target: Target) -> float | None:
        if self._is_proven and not target.is_proof_due:
            return None
        adapter = target.update.adapter
        seconds = self._supervision.weight_sync_timeout
        try:
            async with asyncio.timeout(seconds):
                difference = await prove(self._api, self._endpoint, target.expectation, adapter)
        except TimeoutError:
            raise ServerError(f"it could not be proven within {seconds:g} s") from None
        self._is_proven = True
        return difference

    # Checked

    async def find_wrong(self) -> str | None:
        """What is wrong with those that it says it holds: it may have been restarted behind our
        back, with the weights that it began with.

        Raises:
            ServerError, RequestRefused: it does not say.
        """
        expected = self.update
        label = await self._label()
        is_old_news = self.is_changing or self.update != expected
        if is_old_news or expected is None or self._may_be(label, expected.version):
            return None
        return f"it has weights {label!r}, not version {expected.version}"

    def find_strange(self, labels: set[str], oldest: int) -> str | None:
        """What is wrong with the labels of a completion's tokens: other weights wrote them than
        those that the server was given since the oldest."""
        strange = sorted(label for label in labels if not self._may_be(label, oldest))
        return f"it samples with weights {strange}, not {oldest}" if strange else None

    def _may_be(self, label: str, oldest: int) -> bool:
        """Whether these are weights that it was given, since the oldest."""
        return label.isdecimal() and oldest <= int(label) <= self._newest()
