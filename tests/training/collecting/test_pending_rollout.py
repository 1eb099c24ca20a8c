"""The rollout of one step: when it is sampled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import completion, prompt

from lit_grpo.training.collecting.pending_rollout import PendingRollout, score_while_sampling


def test_a_rank_that_waits_again_for_another_one_does_not_sample_again():
    added = []
    scoring = SimpleNamespace(add=lambda row, completion: added.append(row))
    pending = PendingRollout(
        [prompt()], scoring, lambda: iter([(0, completion())]), samples_in_thread=False
    )
    assert pending.sample_or_wait(1.0)
    assert pending.sample_or_wait(1.0)
    assert added == [0]


@pytest.mark.parametrize("name", ["sampler_logprobs", "policy_versions"])
def test_an_engine_that_yields_too_few_entries_is_told_which(name):
    whole = completion()
    num_tokens = len(whole.token_ids)
    short = replace(whole, **{name: (0,) * (num_tokens - 1)})
    scoring = SimpleNamespace(add=lambda row, completion: None)
    score_while_sampling(scoring, [(0, whole)])
    message = f"{name} with one entry per token, got {num_tokens - 1} for the {num_tokens} tokens"
    with pytest.raises(ValueError, match=message):
        score_while_sampling(scoring, [(0, whole), (7, short)])


def test_an_engine_that_ends_a_completion_for_an_unknown_reason_is_told_so():
    one = replace(completion(), finish_reason="eos")
    with pytest.raises(ValueError, match="finish_reason of stop, length, failed, got 'eos' in row"):
        score_while_sampling(SimpleNamespace(), [(0, one)])
