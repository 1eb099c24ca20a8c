"""Start the rollout of one step: sample its completions, and pass each to the rewards.

`score_gate` waits for the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import MappingProxyType

from lit_grpo.concurrency import is_done, run_in_daemon_thread
from lit_grpo.rewards.scoring.scoring import Scoring
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import EngineFailed, RolloutEngine, Sampling
from lit_grpo.training.collecting.checked_engine import generate
from lit_grpo.types import Completion, Prompt, StageProgress
from lit_grpo.types.errors import EngineBug
from lit_grpo.types.rollouts import ScoredCompletion

NO_ROWS: Mapping[int, ScoredCompletion] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFactory:
    """Create rollouts with one engine, its sampling settings and the rewards."""

    engine: RolloutEngine
    rewards: RewardSuite
    sampling: Sampling
    group_size: int

    def create(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        finished: Mapping[int, ScoredCompletion] = NO_ROWS,
    ) -> PendingRollout:
        """Return a rollout of G completions per prompt; finished rows are not sampled again.

        It is not started yet, but the scores that finished rows lack are requested at once. The
        prompts go to the engine and to the rewards; a completion finds its prompt by its row
        number.
        """
        scoring = self.rewards.open(prompts, self.group_size) if prompts else None
        if scoring is not None:
            for row, one in finished.items():
                scoring.add(row, one.completion, one.scores)
        return PendingRollout(
            list(prompts),
            scoring,
            lambda: self._sample(prompts, seed, finished),
            samples_in_thread=self.engine.overlaps_updates,
        )

    def _sample(
        self, prompts: Sequence[Prompt], seed: int, finished: Mapping[int, ScoredCompletion]
    ) -> Iterator[tuple[int, Completion]]:
        size = self.group_size
        if not finished:
            return generate(self.engine, prompts, size, self.sampling, seed=seed)
        rows = [row for row in range(len(prompts) * size) if row not in finished]
        alone = [prompts[row // size] for row in rows]  # each row as a group of one
        sampled = generate(self.engine, alone, 1, self.sampling, seed=seed) if rows else ()
        return ((rows[index], completion) for index, completion in sampled)


def with_unfinished_tokens(finished: StageProgress, engine: RolloutEngine) -> StageProgress:
    """Add the tokens of completions that the engine is still sampling."""
    return replace(finished, num_tokens=finished.num_tokens + engine.num_unfinished_tokens)


class PendingRollout:
    """A rollout that may still be sampled; completions go to the rewards as they finish.

    Args:
        scoring: Takes the completions; None without prompts.
        generate: Starts the engine's generation.
        samples_in_thread: Whether the engine can sample while the main thread does other work.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        scoring: Scoring | None,
        generate: Callable[[], Iterator[tuple[int, Completion]]],
        *,
        samples_in_thread: bool,
    ) -> None:
        self.prompts = prompts
        self.scoring = scoring
        self.engine_failure: EngineFailed | EngineBug | None = None
        """Why the engine gave up; None if it did not."""
        self._generate = generate
        self._samples_in_thread = samples_in_thread
        self._sampling: Future[None] | None = None
        self._is_cancelled = False
        self._is_sampled = False
        """Whether an engine that samples in the caller's thread is done."""

    def start(self) -> None:
        """Start sampling in a thread."""
        self._sampling = run_in_daemon_thread(self._sample_into_scoring, "rollout")

    def sample_or_wait(self, seconds: float) -> bool:
        """Sample here, or wait for the thread that does, until the rewards have every completion.

        Return False on timeout, True also if the engine has given up. Start sampling if it has not
        been started.

        Args:
            seconds: Maximum wait for an engine that samples in a thread. Any other engine samples
                in this call, however long that takes, and calls ``on_wait`` meanwhile, so that
                the ranks keep waiting together.
        """
        if self._sampling is None and self._samples_in_thread:
            self.start()
        if self._sampling is None:
            if not self._is_sampled:  # another rank may have made this one wait again
                self._sample_into_scoring()
                self._is_sampled = True
            return True
        if not is_done(self._sampling, seconds):
            return False
        self._sampling.result()  # raises what the thread raised
        return True

    def finished(self) -> dict[int, ScoredCompletion]:
        """Return by row the completions so far, with their scores."""
        return {} if self.scoring is None else self.scoring.finished()

    def cancel(self) -> None:
        """Cancel missing scores; sampling stops at the next completion."""
        self._is_cancelled = True
        if self.scoring is not None:
            self.scoring.cancel()

    def _sample_into_scoring(self) -> None:
        if self.scoring is None:
            return
        try:
            self.scoring.add_all(self._until_cancelled())
        except EngineBug as error:
            self.engine_failure = error
        except EngineFailed as error:
            self.engine_failure = EngineFailed(str(error))  # a subclass may not be picklable

    def _until_cancelled(self) -> Iterator[tuple[int, Completion]]:
        for row, completion in self._generate():
            if self._is_cancelled:
                return
            yield row, completion
