import asyncio
import threading

import pytest
from tiny import completion, prompt
from worker_processes import wait_until

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Completion, Outcome, Score, StageProgress

PROMPTS = [prompt(id="a"), prompt(id="b")]


def number(text: str):
    return completion(text=text)


def failed(outcome: Outcome) -> Score:
    return Score(value=None, outcome=outcome, detail="on purpose")


class Siblings(Reward):
    """Scores each completion with its number, and records which ones came together."""

    siblings_per_call = 2

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls = []
        self.called = threading.Semaphore(0)

    def score_group(self, prompt, completions):
        self.calls.append((prompt.id, [one.text for one in completions]))
        self.called.release()
        return [float(one.text) for one in completions]


def test_siblings_are_scored_as_soon_as_enough_have_arrived():
    reward = Siblings()
    with RewardSuite([reward]) as suite:
        scoring = suite.open(PROMPTS, 3)
        scoring.add(0, number("0"))
        scoring.add(4, number("4"))
        scoring.add(2, number("2"))
        assert reward.called.acquire(timeout=60)  # while four are still missing
        assert reward.calls == [("a", ["0", "2"])]
        for row in (3, 5, 1):
            scoring.add(row, number(str(row)))
        rewards = scoring.result().rewards
    assert sorted(reward.calls[1:]) == [("a", ["1"]), ("b", ["3", "4"]), ("b", ["5"])]
    assert rewards.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_it_counts_completions_tokens_and_rows_with_all_scores():
    with RewardSuite([Siblings(), Siblings(name="other")]) as suite:
        scoring = suite.open(PROMPTS, 2)
        scoring.add(0, completion((5, 6, 7), text="0"))
        assert scoring.sampled() == StageProgress(num_done=1, total=4, num_tokens=3)
        assert scoring.scored().num_done == 0
        for row in (1, 2, 3):
            scoring.add(row, number(str(row)))
        scoring.result()
        assert (scoring.sampled().num_done, scoring.scored().num_done) == (4, 4)


class Recovering(Reward):
    """Fails on the first try for numbers above 4, and on every try for 9."""

    def __init__(self, outcome=Outcome.ERROR, **settings):
        super().__init__(**settings)
        self.outcome = outcome
        self.asked = []

    def score(self, prompt, completion):
        self.asked.append(completion.text)
        is_first = self.asked.count(completion.text) == 1
        if completion.text == "9" or (is_first and completion.text > "4"):
            return failed(self.outcome)
        return float(completion.text)


def scores(reward, *texts):
    """Return the rewards of one group, at first and when asked again."""
    with RewardSuite([reward]) as suite:
        scoring = suite.open([prompt()], len(texts))
        for row, text in enumerate(texts):
            scoring.add(row, number(text))
        first = scoring.result()
        scoring.retry()
        return first.rewards[0].tolist(), scoring.result().rewards[0].tolist()


def test_only_failed_rows_are_asked_again_and_the_others_keep_their_scores():
    reward = Recovering()
    first, second = scores(reward, "3", "5", "9")
    assert [value == value for value in first] == [True, False, False]
    assert second[:2] == [3.0, 5.0]
    assert second[2] != second[2]
    assert reward.asked == ["3", "5", "9", "5", "9"]


@pytest.mark.parametrize("outcome", [Outcome.TRUNCATED, Outcome.ABSTAIN])
def test_failures_of_the_completion_itself_are_not_asked_again(outcome):
    reward = Recovering(outcome)
    scores(reward, "3", "5")
    assert reward.asked == ["3", "5"]


def test_a_whole_group_is_asked_again_if_siblings_are_compared():
    class Ranks(Recovering):
        def score_group(self, prompt, completions):
            return [self.score(prompt, one) for one in completions]

    reward = Ranks()
    _, second = scores(reward, "3", "5")
    assert reward.asked == ["3", "5"] * 2
    assert second == [3.0, 5.0]


def test_a_score_that_arrives_after_the_deadline_is_dropped():
    release, returned = threading.Event(), threading.Event()

    class Late(Reward):
        async def score(self, prompt, completion):
            if completion.text == "1":
                await asyncio.to_thread(release.wait, 60)
                asyncio.get_running_loop().call_later(0.01, returned.set)  # after the delivery
            return float(completion.text)

    with RewardSuite([Late()]) as suite:
        scoring = suite.open([prompt()], 2)
        for row in (0, 1):
            scoring.add(row, number(str(row)))
        wait_until(lambda: scoring.scored().num_done == 1)
        assert not scoring.wait(0)
        scoring.expire(0.3)
        assert scoring.wait(0)
        release.set()
        assert returned.wait(60)
        (first, second) = scoring.result().groups[0].scores["late"]
    assert first.value == 0.0
    assert (second.value, second.outcome) == (None, Outcome.TIMEOUT)
    assert "score_deadline_seconds" in second.detail


def saved_and_scored(reward, *texts):
    """Return what was finished of a group, after a failed row, and of a scoring that goes on."""
    with RewardSuite([reward]) as suite:
        scoring = suite.open([prompt()], len(texts) + 1)
        for row, text in enumerate(texts):
            scoring.add(row, number(text))
        scoring.add(len(texts), Completion.failed("no server"))
        scoring.result()
        finished = scoring.finished()
        again = suite.open([prompt()], len(texts) + 1)
        for row, one in finished.items():
            again.add(row, one.completion, one.scores)
        again.add(len(texts), number("1"))
        return finished, again.result().rewards[0].tolist()


def test_what_is_finished_is_not_scored_again_but_for_failures():
    reward = Recovering()
    finished, rewards = saved_and_scored(reward, "3", "5")
    assert {row: one.completion.text for row, one in finished.items()} == {0: "3", 1: "5"}
    assert [{*one.scores} for one in finished.values()] == [{"recovering"}, set()]
    assert reward.asked == ["3", "5", "5", "1"]
    assert rewards == [3.0, 5.0, 1.0]


def test_siblings_that_are_compared_keep_their_scores_only_as_a_whole_group():
    reward = Siblings()
    finished, _ = saved_and_scored(reward, "3", "2")
    assert [one.scores for one in finished.values()] == [{}, {}]
    assert reward.calls == [("p", ["3", "2"])] * 2 + [("p", ["1"])]
    with RewardSuite([reward]) as suite:
        scoring = suite.open([prompt()], 2)
        scoring.add(0, number("3"))
        scoring.add(1, number("2"))
        scoring.result()
        assert [one.scores["siblings"].value for one in scoring.finished().values()] == [3, 2]
