"""The rollout of one step: when it is sampled."""

import pickle
from types import SimpleNamespace

import pytest
from tiny import completion, prompt

from lit_grpo.rollout import EngineFailed
from lit_grpo.training.collecting.pending_rollout import PendingRollout
from lit_grpo.types.errors import EngineBug


def test_a_rank_that_waits_again_for_another_one_does_not_sample_again():
    added = []
    scoring = SimpleNamespace(add=lambda row, completion: added.append(row))
    pending = PendingRollout(
        [prompt()], scoring, lambda: iter([(0, completion())]), samples_in_thread=False
    )
    assert pending.sample_or_wait(1.0)
    assert pending.sample_or_wait(1.0)
    assert added == [0]


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

    scoring = SimpleNamespace(cancel=lambda: None)
    pending = PendingRollout([prompt()], scoring, sample, samples_in_thread=False)
    assert pending.engine_failure is None
    assert pending.sample_or_wait(1.0)
    sent = pickle.loads(pickle.dumps(pending.engine_failure))
    assert (type(sent), str(sent)) == (kind, "http://a is gone")
