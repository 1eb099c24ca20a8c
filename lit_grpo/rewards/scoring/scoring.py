"""Score the completions of one rollout step while others are still being generated.

This module makes the calls and collects their scores; the runners execute the calls.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from lit_grpo.concurrency import WAKE_SECONDS
from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.scoring.boundary import as_permanent
from lit_grpo.rewards.scoring.reasoning import Reasoning
from lit_grpo.rewards.scoring.runners import Call, Runners
from lit_grpo.rewards.scoring.valid_rows import combine, weighted_names
from lit_grpo.types import Completion, Group, Outcome, Prompt, RolloutBatch, Score, StageProgress
from lit_grpo.types.rollouts import ScoredCompletion

MAX_WAIT_SECONDS = threading.TIMEOUT_MAX
NO_SCORES: Mapping[str, Score] = MappingProxyType({})


class RewardFailed(RuntimeError):
    """A reward with ``on_error: raise`` gave no value."""

    def __init__(self, reward: str, prompt_id: str, score: Score) -> None:
        super().__init__(
            f"reward {reward} failed on prompt {prompt_id} with outcome {score.outcome}: "
            f"{score.detail or 'no detail'} (its on_error is 'raise'). Fix the reward, or set "
            "on_error to 'mask' to train without the rows that it cannot score."
        )
        self.bug = score.bug


class Scoring:
    """The scores of one rollout step: B prompts with G completions each.

    Args:
        rewards: The rewards, which have been started.
        runners: Execute the calls.
        warn: Called with each failed call and one of its scores.
        reasoning: Finds the answers of completions; None gives every reward the whole completion.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        runners: Runners,
        warn: Callable[[Call, Score], None],
        reasoning: Reasoning | None,
        prompts: Sequence[Prompt],
        group_size: int,
    ) -> None:
        self._rewards = rewards
        self._runners = runners
        self._warn = warn
        self._reasoning = reasoning
        self._prompts = tuple(prompts)
        self._group_size = group_size
        num_rows = len(self._prompts) * group_size
        self._completions: list[Completion | None] = [None] * num_rows
        self._scores: dict[str, list[Score | None]] = {
            reward.name: [None] * num_rows for reward in rewards
        }
        self._num_to_add = [group_size] * len(self._prompts)
        self._siblings: dict[tuple[str, int], list[int]] = defaultdict(list)
        """(reward, group) -> rows waiting to be scored together with their siblings."""
        self._num_pending = num_rows * len(rewards)
        self._failure: RewardFailed | None = None
        self._bugs: list[tuple[Call, Score]] = []
        self._changed = threading.Condition()
        self._is_cancelled = False

    def add(self, row: int, completion: Completion, known: Mapping[str, Score] = NO_SCORES) -> None:
        """Schedule the scoring of a completion, and return at once.

        A completion that failed is not scored, and its siblings are scored without it.

        Args:
            known: Scores that rewards have given already, by the name of the reward.
        """
        if not 0 <= row < len(self._completions):
            raise ValueError(f"row must be from 0 to {len(self._completions) - 1}, got {row}")
        if self._completions[row] is not None:
            raise ValueError(f"row {row} was added twice (each completion is scored once)")
        self._completions[row] = completion
        group = row // self._group_size
        self._num_to_add[group] -= 1
        if completion.is_failed:
            outcome = Outcome.NOT_SAMPLED
            absent = Score(value=None, outcome=outcome, detail=completion.failure)
            known = dict.fromkeys(self._scores, absent)
        for reward in self._rewards:
            if not reward.applies_to(self._prompts[group]):
                self._fill(reward.name, {row: Score(value=None, outcome=Outcome.OTHER_SOURCE)})
                continue
            if reward.name in known:
                self._fill(reward.name, {row: known[reward.name]})
            rows = () if reward.name in known else (row,)
            self._schedule(reward, group, rows, is_last=not self._num_to_add[group])
        self._runners.expire()

    def add_all(self, sampled: Iterable[tuple[int, Completion]]) -> None:
        """Schedule the scoring of completions with their rows, each as soon as it is sampled."""
        for row, completion in sampled:
            self.add(row, completion)

    def _schedule(self, reward: Reward, group: int, rows: Sequence[int], *, is_last: bool) -> None:
        waiting = self._siblings[reward.name, group]
        waiting.extend(rows)
        size = reward.siblings_per_call if reward.is_grouped else 1
        if waiting and (is_last or len(waiting) == size):
            self._submit(reward, tuple(sorted(waiting)))
            waiting.clear()

    def wait(self, seconds: float = MAX_WAIT_SECONDS) -> bool:
        """Wait up to ``seconds`` for the missing scores.

        Return False on timeout; True when all have arrived or a reward with ``on_error: raise`` has
        failed.
        """
        self._check_complete()
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._num_pending and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, self._runners.expire() or left, WAKE_SECONDS))
        return True

    def result(self) -> RolloutBatch:
        """Wait for the missing scores and combine all of them.

        Raises:
            RewardFailed: a reward with ``on_error: raise`` gave no value.
        """
        self.wait()
        if self._failure is not None:
            self.cancel()
            raise self._failure
        return self._combined()

    def so_far(self) -> RolloutBatch:
        """Return the scores so far; calls that still run change nothing."""
        self.cancel()
        self._give_up_on("the step ended before it came")
        return self._combined()

    def _combined(self) -> RolloutBatch:
        return combine(self._rewards, map(self._group, range(len(self._prompts))))

    def expire(self, seconds: float) -> None:
        """Record a timeout for every score that is missing after ``seconds`` of waiting."""
        self._give_up_on(f"no score within {seconds:g} s after generation (score_deadline_seconds)")

    def _give_up_on(self, detail: str) -> None:
        late = Score(value=None, outcome=Outcome.TIMEOUT, detail=detail)
        for reward in self._rewards:
            self._fill(reward.name, dict.fromkeys(range(len(self._completions)), late))

    def retry(self) -> None:
        """Score again the rows that failed for a reason other than the completion itself."""
        for reward in self._rewards:
            for group in range(len(self._prompts)):
                rows = [row for row in self._rows(group) if self._is_outage(reward.name, row)]
                if rows and reward.is_grouped and reward.siblings_per_call is None:
                    rows = [row for row in self._rows(group) if not self._added(row).is_failed]
                with self._changed:
                    for row in rows:
                        self._scores[reward.name][row] = None
                    self._num_pending += len(rows)
                for row in rows:
                    self._schedule(reward, group, (row,), is_last=row == rows[-1])

    def _is_outage(self, name: str, row: int) -> bool:
        score = self._scores[name][row]
        return score is not None and score.is_outage

    def _check_complete(self) -> None:
        if self.is_cancelled:
            raise RuntimeError("this scoring was cancelled, so it has no result")
        if any(self._num_to_add):
            rows = [row for row, one in enumerate(self._completions) if one is None]
            raise RuntimeError(f"rows {rows[:8]} were never added, so they have no scores")

    def finished(self) -> dict[int, ScoredCompletion]:
        """Return the completions so far by row, with the scores that need no second try."""
        kept = {reward.name: self._kept_scores(reward) for reward in self._rewards}
        return {
            row: ScoredCompletion(
                completion=one,
                scores={name: scores[row] for name, scores in kept.items() if row in scores},
            )
            for row, one in enumerate(tuple(self._completions))
            if one is not None and not one.is_failed
        }

    def _kept_scores(self, reward: Reward) -> dict[int, Score]:
        """Return the scores that are not failures by row; for a grouped reward, of whole groups."""
        slots = tuple(self._scores[reward.name])
        kept = {
            row: score
            for row, score in enumerate(slots)
            if score is not None and not score.is_failure
        }
        if not reward.is_grouped:
            return kept
        groups = map(self._rows, range(len(self._prompts)))
        whole = [group for group in groups if all(row in kept for row in group)]
        return {row: kept[row] for group in whole for row in group}

    def sampled(self) -> StageProgress:
        """Return how many completions have been added."""
        added = [one for one in self._completions if one is not None]
        num_tokens = sum(len(one.token_ids) for one in added)
        return StageProgress(
            num_done=len(added), total=len(self._completions), num_tokens=num_tokens
        )

    def scored(self) -> StageProgress:
        """Return how many completions have all their scores."""
        num_scored = sum(None not in scores for scores in zip(*self._scores.values(), strict=True))
        return replace(self.sampled(), num_done=num_scored)

    def num_unscored(self) -> dict[str, int]:
        """Return how many of the completions so far have no score, by reward."""
        rows = [row for row, one in enumerate(self._completions) if one is not None]
        return {
            name: sum(scores[row] is None for row in rows) for name, scores in self._scores.items()
        }

    @property
    def weighted_rewards(self) -> list[str]:
        """Names of the rewards with a weight other than 0."""
        return weighted_names(self._rewards)

    def cancel(self) -> None:
        """Abandon the step: calls that were not started are skipped."""
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or self._runners.is_closed

    def deliver(self, call: Call, scores: tuple[Score, ...]) -> None:
        """Store the scores of a call; runs on the thread that made it."""
        scores = tuple(map(self._with_known_tokens, call.rows, call.completions, scores))
        if not call.reward.is_async:
            scores = as_permanent(scores)
        failed = next((score for score in scores if score.is_failure), None)
        if failed is not None:
            if failed.bug:
                self._bugs.append((call, failed))
            else:
                self._warn(call, failed)
            if call.reward.on_error == "raise" and self._failure is None:
                self._failure = RewardFailed(call.reward.name, call.prompt.id, failed)
        self._fill(call.reward.name, dict(zip(call.rows, scores, strict=True)))

    def warn_of_bugs(self) -> None:
        """Log the bugs so far; a caller that ends because of one describes it."""
        bugs, self._bugs = self._bugs, []
        for call, score in bugs:
            self._warn(call, score)

    def _with_known_tokens(self, row: int, scored: Completion, score: Score) -> Score:
        """Return the score, or a failure if its steps are not at tokens of the completion."""
        token_ids = self._added(row).token_ids
        places = [index for index, _ in score.steps]
        is_same = scored.token_ids == token_ids
        if score.num_values not in (None, len(token_ids)):
            what = f"{score.num_values} values by token"
        elif places and not (is_same and all(0 <= one < len(token_ids) for one in places)):
            what = f"steps at tokens {places[:8]}"
        else:
            return score
        detail = (
            f"{what} of a completion with {len(token_ids)} tokens, of which the reward saw "
            f"{len(scored.token_ids)} (with reasoning: keep it sees all of them)"
        )
        return replace(
            score, value=None, outcome=Outcome.ERROR, detail=detail, steps=(), bug=detail
        )

    def _fill(self, name: str, scores: Mapping[int, Score]) -> None:
        """Store scores where there are none yet; late ones are dropped."""
        slots = self._scores[name]
        with self._changed:
            for row, score in scores.items():
                if slots[row] is None:
                    slots[row] = score
                    self._num_pending -= 1
            if not self._num_pending or self._failure is not None:
                self._changed.notify_all()

    def _rows(self, group: int) -> range:
        return range(group * self._group_size, (group + 1) * self._group_size)

    def _submit(self, reward: Reward, rows: tuple[int, ...]) -> None:
        prompt = self._prompts[rows[0] // self._group_size]
        completions = tuple(self._added(row) for row in rows)
        if self._reasoning is not None and reward.reasoning == "strip":
            completions = tuple(self._reasoning.answer(prompt, one) for one in completions)
        call = Call(reward=reward, receiver=self, prompt=prompt, rows=rows, completions=completions)
        self._runners.submit(call)

    def _added(self, row: int) -> Completion:
        completion = self._completions[row]
        assert completion is not None
        return completion

    def _group(self, group: int) -> Group:
        rows = self._rows(group)
        scores = {}
        for name, slots in self._scores.items():
            scores[name] = tuple(score for row in rows if (score := slots[row]) is not None)
        return Group(
            prompt=self._prompts[group],
            completions=tuple(self._added(row) for row in rows),
            scores=scores,
        )
