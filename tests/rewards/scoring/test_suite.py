import asyncio
import copy
import pickle
import random
import threading
import time

import pytest
from tiny import completion, prompt

from lit_grpo.rewards import LengthReward, Reward
from lit_grpo.rewards.scoring import RewardFailed, RewardSuite, runners
from lit_grpo.types import Outcome, Score

NAN = float("nan")


def texts(*rows):
    return [[completion(text=text) for text in row] for row in rows]


def outcomes(batch, name):
    return [[str(score.outcome) for score in group.scores[name]] for group in batch.groups]


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(runners, "FIRST_BACKOFF_SECONDS", 0.001)


class Value(Reward):
    """The text as a number; raises if it is not one."""

    def score(self, prompt, completion):
        return float(completion.text)


class AsyncValue(Reward):
    async def score(self, prompt, completion):
        await asyncio.sleep(0)
        return float(completion.text)


class Rank(Reward):
    def score_group(self, prompt, completions):
        ordered = sorted(completion.text for completion in completions)
        return [ordered.index(completion.text) for completion in completions]


class AsyncRank(Rank):
    async def score_group(self, prompt, completions):
        return super().score_group(prompt, completions)


def test_completions_without_a_score_are_counted_by_reward_until_they_have_one():
    go = threading.Event()

    class Held(Reward):
        def score(self, prompt, completion):
            go.wait(60)
            return 1.0

    with RewardSuite([Held(), LengthReward(start_tokens=1, end_tokens=4)]) as suite:
        assert suite.num_unscored() == {}
        scoring = suite.open([prompt(id="a"), prompt(id="b")], 2)
        for row in range(3):
            scoring.add(row, completion(text="1"))
        while suite.num_unscored() != {"held": 3}:
            time.sleep(0.01)
        assert scoring.num_unscored() == {"held": 3, "length": 0}
        go.set()
        scoring.add(3, completion(text="1"))
        scoring.result()
        assert suite.num_unscored() == {}


def test_every_kind_of_reward_is_scored_and_summed():
    rewards = [Value(), AsyncValue(weight=10), Rank(weight=100), AsyncRank(weight=1000)]
    with RewardSuite(rewards) as suite:
        batch = suite.score([prompt(id="a"), prompt(id="b")], texts("31", "02"))
    assert batch.rewards.tolist() == [[1133.0, 11.0], [0.0, 1122.0]]
    assert batch.parts["async_rank"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert batch.valid.all()
    assert [group.prompt.id for group in batch.groups] == ["a", "b"]
    assert [one.text for one in batch.completions] == list("3102")


def test_completions_may_arrive_in_any_order():
    with RewardSuite([Value(), Rank()]) as suite:
        scoring = suite.open([prompt(), prompt()], 2)
        for row in (3, 0, 2, 1):
            scoring.add(row, completion(text=str(row)))
        assert scoring.result().rewards.tolist() == [[0.0, 2.0], [2.0, 4.0]]


def test_scoring_starts_before_the_last_completion_arrives():
    scored = threading.Event()

    class Tells(Reward):
        def score(self, prompt, completion):
            scored.set()
            return 1.0

    with RewardSuite([Tells()]) as suite:
        scoring = suite.open([prompt()], 2)
        scoring.add(0, completion())
        assert scored.wait(30)
        scoring.add(1, completion())
        assert scoring.result().valid.all()


def test_group_is_scored_when_its_last_completion_arrives():
    scored = threading.Event()

    class Tells(Reward):
        def score_group(self, prompt, completions):
            scored.set()
            return [1.0] * len(completions)

    with RewardSuite([Tells()]) as suite:
        scoring = suite.open([prompt(), prompt()], 2)
        scoring.add(0, completion())
        scoring.add(2, completion())
        assert not scored.wait(0.05)
        scoring.add(3, completion())
        assert scored.wait(30)
        scoring.add(1, completion())
        assert scoring.result().valid.all()


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


@pytest.mark.parametrize("kind", [Value, AsyncValue])
def test_exception_in_a_reward_masks_its_row(kind):
    with RewardSuite([kind(name="v")]) as suite:
        batch = suite.score([prompt()], texts(["1", "one", "3"]))
    assert batch.valid.tolist() == [[True, False, True]]
    assert outcomes(batch, "v") == [["ok", "error", "ok"]]
    detail = "ValueError: could not convert string to float: 'one'"
    assert batch.groups[0].scores["v"][1].detail == detail


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


@pytest.mark.parametrize("kind", [Rank, AsyncRank])
def test_wrong_number_of_scores_masks_the_whole_group(kind):
    class Short(kind):
        def score_group(self, prompt, completions):
            return super().score_group(prompt, completions[1:])

    with RewardSuite([Short()]) as suite:
        batch = suite.score([prompt()], texts("ab"))
    assert outcomes(batch, "short") == [["error", "error"]]


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


def test_drop_group_excludes_the_siblings():
    with RewardSuite([Value(on_error="drop_group")]) as suite:
        batch = suite.score([prompt(), prompt()], texts(["1", "one"], ["3", "4"]))
    assert batch.valid.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("kind", [Value, AsyncValue])
def test_raise_names_the_reward_the_prompt_and_the_reason(kind):
    with RewardSuite([kind(name="v", on_error="raise")]) as suite:
        with pytest.raises(RewardFailed, match="v failed on prompt p7 .*error: ValueError"):
            suite.score([prompt(id="p7")], texts(["1", "one"]))
        assert suite.score([prompt()], texts("12")).rewards.tolist() == [[1.0, 2.0]]


def test_raise_does_not_wait_for_the_other_scores():
    release = threading.Event()

    class Waits(Reward):
        def score(self, prompt, completion):
            release.wait()
            return 1.0

    with RewardSuite([Value(on_error="raise"), Waits()]) as suite:
        with pytest.raises(RewardFailed):
            suite.score([prompt()], texts(["one", "two"]))
        release.set()


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


def test_a_bug_is_logged_once_whatever_it_says_about_the_row(caplog):
    class Looks(Reward):
        def score(self, prompt, completion):
            return {"1": 1.0}[completion.text]

    with RewardSuite([Looks()]) as suite:
        suite.score([prompt()], texts("12345678"))
    (record,) = caplog.records
    assert record.traceback.splitlines()[-1].startswith("KeyError: ")


def test_a_plain_function_is_a_reward():
    def half(completions, **columns):
        return [0.5] * len(completions)

    with RewardSuite([half]) as suite:
        assert suite.score([prompt()], texts("12")).rewards.tolist() == [[0.5, 0.5]]


def test_row_added_twice_or_never_or_beyond_the_last_is_an_error():
    with RewardSuite([Value()]) as suite:
        scoring = suite.open([prompt()], 2)
        for row in (-1, 2):
            with pytest.raises(ValueError, match=f"row must be from 0 to 1, got {row}"):
                scoring.add(row, completion(text="1"))
        scoring.add(1, completion(text="1"))
        with pytest.raises(ValueError, match="row 1 was added twice"):
            scoring.add(1, completion(text="1"))
        with pytest.raises(RuntimeError, match=r"rows \[0\] were never added"):
            scoring.result()


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


class Lifecycle(Reward):
    def __init__(self, log, **kwargs):
        super().__init__(**kwargs)
        self.log = log

    def start(self):
        self.log.append("start")

    def check(self, prompts):
        self.log.append(f"check {len(prompts)}")

    def close(self):
        self.log.append("close")

    def score(self, prompt, completion):
        return 1.0


class AsyncLifecycle(Lifecycle):
    async def start(self):
        self.loop = asyncio.get_running_loop()
        super().start()

    async def check(self, prompts):
        super().check(prompts)

    async def close(self):
        assert self.loop is asyncio.get_running_loop()
        super().close()


@pytest.mark.parametrize("kind", [Lifecycle, AsyncLifecycle])
def test_rewards_are_started_checked_and_closed_once_per_start(kind):
    log = []
    suite = RewardSuite([kind(log, name="l")])
    for _ in range(2):
        suite.start()
        suite.start()
        suite.check([prompt(), prompt()])
        assert suite.score([prompt()], texts("a")).valid.all()
        suite.close()
        suite.close()
    assert log == ["start", "check 2", "close"] * 2


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


def test_if_a_reward_cannot_start_the_others_are_closed():
    log = []

    class Refuses(Lifecycle):
        def start(self):
            raise ValueError("no credentials")

    with pytest.raises(ValueError, match="no credentials"):
        RewardSuite([Lifecycle(log), Refuses(log)]).start()
    assert log == ["start", "close"]


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


def test_first_failure_of_a_kind_is_logged_and_the_others_are_not(caplog):
    with RewardSuite([Value()]) as suite:
        for _ in range(2):
            suite.score([prompt(id="p7")], texts(["one", "two"]))
    (record,) = caplog.records
    assert "'value' gave no value for prompt p7: error: ValueError: could not" in record.message


def test_scoring_leaves_the_global_random_state_alone():
    random.seed(1)
    state = random.getstate()
    with RewardSuite([Flaky(1, on_error="retry"), Value()]) as suite:
        suite.score([prompt()], texts("12"))
    assert random.getstate() == state


def test_suite_that_is_not_started_can_be_copied_and_pickled():
    suite = RewardSuite([LengthReward(1, 2)])
    for twin in (copy.deepcopy(suite), pickle.loads(pickle.dumps(suite))):
        with twin:
            assert twin.score([prompt()], [[completion([1, 2, 3])]]).rewards.tolist() == [[-1.0]]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "at least one reward must have a weight other than 0, got none"),
        ([Value(weight=0)], r"must have a weight other than 0, got \['value'\]"),
        ([Value(), Value(weight=2)], "unique names, got value more than once"),
        (
            [Value(weight=NAN)],
            "weight must be a finite number, got nan. Set Value.init",
        ),
    ],
)
def test_suite_without_a_usable_set_of_rewards_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardSuite(rewards)
