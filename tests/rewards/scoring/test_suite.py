import asyncio
import copy
import pickle
import threading
import time

import pytest
import torch
from text_rewards import AsyncValue, Value, outcomes, texts
from tiny import completion, prompt

from lit_grpo.rewards import LengthReward, Reward
from lit_grpo.rewards.scoring.scoring import RewardFailed
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import UserCodeFailed

NAN = float("nan")


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


@pytest.mark.parametrize("kind", [Value, AsyncValue])
def test_exception_in_a_reward_masks_its_row(kind):
    with RewardSuite([kind(name="v")]) as suite:
        batch = suite.score([prompt()], texts(["1", "one", "3"]))
    assert batch.valid.tolist() == [[True, False, True]]
    assert outcomes(batch, "v") == [["ok", "error", "ok"]]
    detail = "ValueError: could not convert string to float: 'one'"
    assert batch.groups[0].scores["v"][1].detail == detail


@pytest.mark.parametrize("kind", [Rank, AsyncRank])
def test_wrong_number_of_scores_masks_the_whole_group(kind):
    class Short(kind):
        def score_group(self, prompt, completions):
            return super().score_group(prompt, completions[1:])

    with RewardSuite([Short()]) as suite:
        batch = suite.score([prompt()], texts("ab"))
    assert outcomes(batch, "short") == [["error", "error"]]


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


def test_if_a_reward_cannot_start_the_others_are_closed():
    log = []

    class Refuses(Lifecycle):
        def start(self):
            raise ValueError("no credentials")

    bug = r"(?s)^the start of reward 'refuses' failed:\n.*test_suite.py.*no credentials$"
    with pytest.raises(UserCodeFailed, match=bug):
        RewardSuite([Lifecycle(log), Refuses(log)]).start()
    assert log == ["start", "close"]


def test_first_failure_of_a_kind_is_logged_and_the_others_are_not(caplog):
    with RewardSuite([Value()]) as suite:
        for _ in range(2):
            suite.score([prompt(id="p7")], texts(["one", "two"]))
    (record,) = caplog.records
    assert "'value' gave no value for prompt p7: error: ValueError: could not" in record.message


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
        ([Value(weight="0.5")], "weight must be a finite number, got '0.5'. Set Value.init"),
        ([Value(weight=None)], "weight must be a finite number, got None. Set Value.init"),
    ],
)
def test_suite_without_a_usable_set_of_rewards_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        RewardSuite(rewards)


class Counts(Value):
    def __init__(self):
        super().__init__()
        self.scored = []

    def score(self, prompt, completion):
        self.scored.append(completion.text)
        return 1.0

    def state_dict(self):
        return {"scored": self.scored}

    def load_state_dict(self, state):
        self.scored = state["scored"]


class Mean(Counts):
    """Its state is a tensor that is changed in place, and has a graph of autograd."""

    def __init__(self):
        super().__init__()
        self.mean = torch.ones(1, requires_grad=True) * 2

    def score(self, prompt, completion):
        with torch.no_grad():
            self.mean += 1
        return 1.0

    def state_dict(self):
        return {"mean": self.mean}


def test_a_tensor_in_the_state_before_a_step_stays_what_it_was():
    with RewardSuite([Mean()]) as suite:
        suite.begin_step()
        suite.score([prompt("p")], [[completion()]])
        assert suite.state_dict()["mean"]["mean"].item() == 2
        suite.begin_step()  # of the same step, which was left undone
        assert suite.state_dict()["mean"]["mean"].item() == 2
    with suite:
        assert suite.state_dict()["mean"]["mean"].item() == 3


class Fails(Counts):
    def state_dict(self):
        raise KeyError("count")


def test_a_bug_in_the_state_of_a_reward_names_it():
    suite = RewardSuite([Fails()])
    suite.start()
    with pytest.raises(UserCodeFailed, match=r"^the state_dict of reward 'fails' failed:\n"):
        suite.state_dict()
    suite.close()


def test_within_a_step_the_state_is_that_before_it():
    with RewardSuite([Counts(), LengthReward(1, 2)]) as suite:
        suite.begin_step()
        suite.score([prompt("p")], [[completion(text="a")]])
        assert suite.state_dict() == {"counts": {"scored": []}, "length": {}}
        suite.end_step()
        assert suite.state_dict()["counts"] == {"scored": ["a"]}
        suite.begin_step()
        suite.load_state_dict({"counts": {"scored": ["b"]}})
        assert suite.state_dict()["counts"] == {"scored": ["b"]}
