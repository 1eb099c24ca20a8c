"""The rollout of one step: when it is sampled."""

from types import SimpleNamespace

from tiny import completion, prompt

from lit_grpo.training.collecting.pending_rollout import PendingRollout


def test_a_rank_that_waits_again_for_another_one_does_not_sample_again():
    added = []
    scoring = SimpleNamespace(add=lambda row, completion: added.append(row))
    pending = PendingRollout(
        [prompt()], scoring, lambda: iter([(0, completion())]), samples_in_thread=False
    )
    assert pending.wait(1.0)
    assert pending.wait(1.0)
    assert added == [0]
