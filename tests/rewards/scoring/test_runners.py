"""Threads, event loop, timeouts and retries of rewards that run in a suite."""

import asyncio
import random
import threading
import time

import pytest
from text_rewards import Value, outcomes, texts
from tiny import completion, prompt

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring import runners
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Outcome, Score


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(runners, "FIRST_BACKOFF_SECONDS", 0.001)


def test_sync_reward_stays_on_one_thread_and_async_ones_share_one_loop():
    places = {"a": set(), "b": set(), "c": set(), "d": set()}

    class Sync(Reward):
        def score(self, prompt, completion):
            places[self.name].add(threading.get_ident())
            return 1.0

    class Async(Reward):
        async def score(self, prompt, completion):
            places[self.name].add(asyncio.get_running_loop())
            return 1.0

    with RewardSuite([Sync(name="a"), Sync(name="b"), Async(name="c"), Async(name="d")]) as suite:
        for _ in range(2):
            suite.score([prompt()], texts("xxxx"))
    assert [len(place) for place in places.values()] == [1, 1, 1, 1]
    assert places["a"] != places["b"]
    assert places["c"] == places["d"]
    assert threading.get_ident() not in places["a"] | places["b"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_no_exception_in_user_code_ends_the_scoring(error):
    class Sync(Reward):
        def score(self, prompt, completion):
            raise error

    class Async(Reward):
        async def score(self, prompt, completion):
            raise error

    with RewardSuite([Sync(), Async(), Value()]) as suite:
        for _ in range(2):
            batch = suite.score([prompt()], texts("12"))
            assert outcomes(batch, "sync") == outcomes(batch, "async") == [["error", "error"]]
            assert outcomes(batch, "value") == [["ok", "ok"]]


def test_sync_reward_that_returns_a_coroutine_is_an_error():
    class Forgotten(Reward):
        def score(self, prompt, completion):
            return asyncio.sleep(0)

    with RewardSuite([Forgotten()]) as suite:
        batch = suite.score([prompt()], texts("a"))
    assert "define it with async def" in batch.groups[0].scores["forgotten"][0].detail


def test_sync_reward_that_takes_too_long_is_a_timeout_and_the_next_row_is_scored():
    release = threading.Event()

    class Hangs(Reward):
        def score(self, prompt, completion):
            if completion.text == "hang":
                release.wait()
            return 1.0

    with RewardSuite([Hangs(timeout_seconds=0.5)]) as suite:
        batch = suite.score([prompt()], texts(["a", "hang", "b", "hang", "c"]))
        assert outcomes(batch, "hangs") == [["ok", "timeout", "ok", "timeout", "ok"]]
        assert "is abandoned" in batch.groups[0].scores["hangs"][1].detail
        release.set()
        # Late results of the abandoned threads must not reach a later step.
        assert suite.score([prompt()], texts("aa")).rewards.tolist() == [[1.0, 1.0]]


def test_sync_group_that_takes_too_long_is_a_timeout_on_every_row():
    release = threading.Event()

    class Hangs(Reward):
        def score_group(self, prompt, completions):
            if prompt.id == "bad":
                release.wait()
            return [1.0] * len(completions)

    prompts = [prompt(id="bad"), prompt(id="good")]
    with RewardSuite([Hangs(timeout_seconds=0.5)]) as suite:
        batch = suite.score(prompts, texts("ab", "cd"))
        release.set()
    assert outcomes(batch, "hangs") == [["timeout", "timeout"], ["ok", "ok"]]


def test_async_reward_that_takes_too_long_is_cancelled_and_a_timeout():
    cancelled = []

    class Hangs(Reward):
        async def score(self, prompt, completion):
            try:
                await asyncio.sleep(3600 if completion.text == "hang" else 0)
            except asyncio.CancelledError:
                cancelled.append(completion.text)
                raise
            return 1.0

    with RewardSuite([Hangs(timeout_seconds=0.5)]) as suite:
        batch = suite.score([prompt()], texts(["a", "hang"]))
    assert outcomes(batch, "hangs") == [["ok", "timeout"]]
    assert cancelled == ["hang"]
    assert "no score within 0.5 s" in batch.groups[0].scores["hangs"][1].detail


class Flaky(Reward):
    """Fails the first ``num_failures`` times on each text."""

    def __init__(self, num_failures, **kwargs):
        super().__init__(**kwargs)
        self.num_failures = num_failures
        self.calls = {}

    def score(self, prompt, completion):
        calls = self.calls[completion.text] = self.calls.get(completion.text, 0) + 1
        if calls <= self.num_failures:
            return Score(value=None, outcome=Outcome.RATE_LIMITED, seconds=1.0, cost=0.25)
        return Score(value=5.0, seconds=1.0, cost=0.25)


class AsyncFlaky(Flaky):
    async def score(self, prompt, completion):
        return super().score(prompt, completion)


@pytest.mark.parametrize("kind", [Flaky, AsyncFlaky])
def test_retry_asks_again_and_adds_up_seconds_and_cost(kind):
    reward = kind(2, name="f", on_error="retry", num_retries=2)
    with RewardSuite([reward]) as suite:
        batch = suite.score([prompt()], texts("ab"))
    assert batch.rewards.tolist() == [[5.0, 5.0]]
    assert reward.calls == {"a": 3, "b": 3}
    assert batch.groups[0].scores["f"][0] == Score(value=5.0, seconds=3.0, cost=0.75)


@pytest.mark.parametrize("kind", [Flaky, AsyncFlaky])
def test_retry_masks_the_row_after_the_last_try(kind):
    reward = kind(3, name="f", on_error="retry", num_retries=2)
    with RewardSuite([reward, Value()]) as suite:
        batch = suite.score([prompt()], texts("12"))
    assert not batch.valid.any()
    assert outcomes(batch, "f") == [["rate_limited"] * 2]
    assert reward.calls == {"1": 3, "2": 3}


def test_only_retry_tries_again_and_only_after_a_failure():
    flaky, abstains = Flaky(1), Flaky(0, name="abstains", on_error="retry")
    abstains.score = lambda prompt, completion: abstains.calls.update(n=1) or None
    with RewardSuite([flaky, abstains]) as suite:
        batch = suite.score([prompt()], texts("a"))
    assert flaky.calls == {"a": 1}
    assert outcomes(batch, "abstains") == [["abstain"]]


def test_timeout_of_a_sync_reward_is_retried():
    release, calls = threading.Event(), []

    class HangsOnce(Reward):
        def score(self, prompt, completion):
            calls.append(completion.text)
            if len(calls) == 1:
                release.wait()
            return float(len(calls))

    with RewardSuite([HangsOnce(on_error="retry", timeout_seconds=0.5)]) as suite:
        batch = suite.score([prompt()], texts("a"))
        release.set()
    assert batch.rewards.tolist() == [[2.0]]
    assert batch.groups[0].scores["hangs_once"][0].seconds >= 0.5


def test_scoring_leaves_the_global_random_state_alone():
    random.seed(1)
    state = random.getstate()
    with RewardSuite([Flaky(1, on_error="retry"), Value()]) as suite:
        suite.score([prompt()], texts("12"))
    assert random.getstate() == state


def test_seconds_are_filled_by_the_boundary_and_shared_by_a_group():
    class Sleeps(Reward):
        def score(self, prompt, completion):
            time.sleep(0.02)
            return 1.0

    class AsyncSleeps(Reward):
        async def score_group(self, prompt, completions):
            await asyncio.sleep(0.05)
            return [1.0] * len(completions)

    with RewardSuite([Sleeps(), AsyncSleeps()]) as suite:
        (group,) = suite.score([prompt()], texts("12")).groups
    assert all(score.seconds >= 0.019 for score in group.scores["sleeps"])
    assert all(score.seconds >= 0.0245 for score in group.scores["async_sleeps"])


def test_cancelled_scoring_starts_no_more_calls_and_has_no_result():
    begun, release, scored = threading.Event(), threading.Event(), []

    class Waits(Reward):
        def score(self, prompt, completion):
            scored.append(completion.text)
            begun.set()
            release.wait()
            return 1.0

    with RewardSuite([Waits()]) as suite:
        scoring = suite.open([prompt()], 3)
        for row, text in enumerate("abc"):
            scoring.add(row, completion(text=text))
        assert begun.wait(30)
        scoring.cancel()
        release.set()
        assert suite.score([prompt()], texts("z")).valid.all()
        with pytest.raises(RuntimeError, match="cancelled"):
            scoring.result()
    assert scored == ["a", "z"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_fails_to_close_is_named(is_async, caplog):
    class Leaky(Reward):
        def score(self, prompt, completion):
            return 1.0

        def close(self):
            raise OSError("already gone")

    class LeakyAsync(Reward):
        async def score(self, prompt, completion):
            return 1.0

        async def close(self):
            raise OSError("already gone")

    kind = LeakyAsync if is_async else Leaky
    with RewardSuite([kind()]) as suite:
        suite.score([prompt()], texts("x"))
    assert f"{kind.__name__}.close failed" in caplog.text
    assert "already gone" in caplog.text


def test_close_ends_every_thread_and_cancels_what_is_pending():
    before = set(threading.enumerate())
    begun, cancelled = threading.Event(), threading.Event()

    class Hangs(Reward):
        async def score(self, prompt, completion):
            begun.set()
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

    suite = RewardSuite([Hangs(), Value(), Value(name="w")])
    suite.start()
    scoring = suite.open([prompt()], 1)
    scoring.add(0, completion(text="1"))
    assert begun.wait(30)
    suite.close()
    assert cancelled.is_set()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="not started"):
        suite.open([prompt()], 1)


def test_close_abandons_a_blocked_loop(monkeypatch):
    monkeypatch.setattr(runners, "CLOSE_SECONDS", 0.2)
    begun, release = threading.Event(), threading.Event()

    class Blocks(Reward):
        async def score(self, prompt, completion):
            begun.set()
            release.wait()

    suite = RewardSuite([Blocks()])
    suite.start()
    suite.open([prompt()], 1).add(0, completion())
    assert begun.wait(30)
    suite.close()
    release.set()
    suite.start()
    suite.close()
