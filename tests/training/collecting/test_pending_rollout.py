"""The rollout of one step: when it is sampled."""

import pickle

import pytest
from tiny import completion, prompt

from lit_grpo.rewards import FunctionReward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import EngineFailed
from lit_grpo.training.collecting.pending_rollout import PendingRollout
from lit_grpo.types.errors import EngineBug


def full_marks(completions):
    return [1.0] * len(completions)


def pending_rollout(sample) -> PendingRollout:
    suite = RewardSuite([FunctionReward(full_marks)])
    suite.start()
    return PendingRollout([prompt()], suite.open([prompt()], 1), sample, samples_in_thread=False)


def test_a_rank_that_waits_again_for_another_one_does_not_sample_again():
    calls = []

    def sample():
        calls.append(None)
        yield 0, completion()

    pending = pending_rollout(sample)
    assert pending.sample_or_wait(1.0)
    assert pending.sample_or_wait(1.0)
    assert len(calls) == 1
    assert [*pending.finished()] == [0]


class NoServers(EngineFailed):
    """An error of an engine's own, which cannot be sent to other ranks."""

    def __init__(self, urls, reason):
        super().__init__(f"{urls} {reason}")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NoServers("http://a", "is gone"), EngineFailed), (EngineBug("http://a is gone"), EngineBug)],
)
def test_why_the_engine_gave_up_is_kept_for_all_ranks(error, kind):
    def sample():
        raise error

    pending = pending_rollout(sample)
    assert pending.engine_failure is None
    assert pending.sample_or_wait(1.0)
    sent = pickle.loads(pickle.dumps(pending.engine_failure))
    assert (type(sent), str(sent)) == (kind, "http://a is gone")
