"""Wait on all ranks together, and stop waiting on all of them when a callback ends the run.

A wait consists of rounds. In each, every rank says whether it is done, and unless all are, the
callbacks may end the run. Ranks may be at different places of a step, as long as each takes part
in every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lit_grpo.distributed.ranks import any_failure, gather_objects
from lit_grpo.stopping import ExitCode
from lit_grpo.training.stages import StageEvents
from lit_grpo.types import RolloutBatch, StopReason, UserCodeFailed

POLL_SECONDS = 1.0
"""Time between two rounds."""

Wait = Callable[[float], bool]
"""Waits for at most so many seconds, and returns whether this rank is done."""


class StepAbandoned(Exception):
    """The rollout step is not trained on, and the run ends; raised on every rank."""

    def __init__(
        self, message: str, exit_code: int = ExitCode.SCORES_ABSENT, cause: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = StopReason(
            exit_code=exit_code, message=message, cause=cause, is_step_unfinished=True
        )


def abandon_if_failed(failure: Exception | None) -> None:
    """Abandon the step on every rank if the engine or the teacher of any rank gave up.

    Args:
        failure: The error of this rank's; None if there is none. Every rank must call this.

    Raises:
        StepAbandoned: the engine of any rank gave up, or has a bug.
    """
    own = None
    if failure is not None:  # its class may not be picklable
        is_bug = isinstance(failure, UserCodeFailed)
        own = str(failure), ExitCode.CRASHED if is_bug else ExitCode.ENGINE_FAILED
    if (found := any_failure(own)) is not None:
        why, exit_code = found
        raise StepAbandoned(f"Stopped: {why}", exit_code)


def wait_until_done(wait: Wait) -> None:
    """Wait without the other ranks, and without asking callbacks."""
    while not wait(POLL_SECONDS):
        pass


class RankWaits:
    """The waits of a run's steps and validations.

    Args:
        events: Asks the callbacks whether to end the run.
    """

    def __init__(self, events: StageEvents) -> None:
        self._events = events

    def report_outage(self, cause: str, message: str) -> None:
        """Tell the callbacks why the run waits."""
        self._events.report_outage(cause, message)

    def report_abandoned_rollouts(self, rollouts: RolloutBatch) -> None:
        """Show the callbacks the rollouts whose missing scores end the run."""
        self._events.report_abandoned_rollouts(rollouts)

    def pause(self, seconds: float) -> None:
        """Wait for an outage to end, on all ranks for the longest of their pauses.

        Raises:
            StepAbandoned: a callback ends the run.
        """
        end = time.monotonic() + seconds

        def sleep(longest: float) -> bool:
            time.sleep(max(0.0, min(longest, end - time.monotonic())))
            return time.monotonic() >= end

        self._events.is_paused = True
        try:
            self.until_done(sleep)
        finally:
            self._events.is_paused = False

    def until_done(self, wait: Wait) -> None:
        """Wait until this and every other rank is done.

        Raises:
            StepAbandoned: a callback ends the run.
        """
        while not all(gather_objects(wait(POLL_SECONDS))):
            self.abandon_if_asked()

    def join_round(self) -> None:
        """Take part in a round as a rank that is not done, from within its work.

        Raises:
            StepAbandoned: a callback ends the run.
        """
        gather_objects(False)
        self.abandon_if_asked()

    def abandon_if_asked(self) -> None:
        """Ask the callbacks; every rank must call this.

        Raises:
            StepAbandoned: a callback ends the run.
        """
        if self._events.is_stop_requested():
            raise StepAbandoned(
                "Ended by a callback while the run waited for completions or rewards."
            )
