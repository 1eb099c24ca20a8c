"""Logprobs and entropies in chunks: values, gradients and how many logits exist at once."""

import pytest
import torch
from packed_batches import batch_of
from tiny import tiny_policy, unbatched_logprobs

from lit_grpo.policy.body_and_head import BodyAndHead
from lit_grpo.policy.logprobs import candidate_statistics, completion_statistics, top_tokens


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.fixture(scope="module")
def batch():
    """Two groups of two ragged completions of the same prompt."""
    prompt = [49, 43, 49, 61]
    return batch_of(prompt, [[7, 8, 9], [1]], prompt, [[2, 3], [4, 5, 6, 7, 8]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("use_packing", [True, False])
def test_packed_padded_and_chunked_logprobs_are_those_of_each_row_alone(
    policy, batch, temperature, chunk_tokens, use_packing
):
    model = BodyAndHead(policy.model, use_packing=use_packing)
    got, entropy = completion_statistics(
        model, batch, temperature=temperature, chunk_logits=chunk_tokens * model.vocab_size
    )
    for n, size in enumerate(batch.completion_mask.sum(1).tolist()):
        expected, expected_entropy = unbatched_logprobs(policy.model, batch, n, temperature)
        torch.testing.assert_close(got[n, :size], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[n, :size], expected_entropy, rtol=0, atol=1e-4)
        assert not got[n, size:].any()


def unbatched_distributions(model, batch, row):
    """Return the [C, V] logprobs of one row, which is alone in its batch."""
    index = batch.prompt_index[row]
    prompt = batch.prompt_ids[index][batch.prompt_mask[index]]
    ids = torch.cat([prompt, batch.completion_ids[row][batch.completion_mask[row]]])
    return (model(ids[None]).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("use_packing", [True, False])
def test_the_top_tokens_are_those_of_each_row_alone_and_have_its_logprobs(
    policy, batch, chunk_tokens, use_packing
):
    model = BodyAndHead(policy.model, use_packing=use_packing)
    chunk_logits = chunk_tokens * model.vocab_size
    top = top_tokens(model, batch, 5, vocab_size=200, temperature=0.7, chunk_logits=chunk_logits)
    statistics, logprobs = candidate_statistics(
        model, batch, top.ids, temperature=0.7, chunk_logits=chunk_logits
    )
    for one, other in zip(
        statistics, completion_statistics(model, batch, temperature=0.7), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for n, size in enumerate(batch.completion_mask.sum(1).tolist()):
        expected = unbatched_distributions(policy.model, batch, n)[:, :200].topk(5)
        assert top.ids[n, :size].equal(expected.indices.int())
        torch.testing.assert_close(top.logprobs[n, :size], expected.values, rtol=0, atol=1e-5)
        torch.testing.assert_close(logprobs[n, :size], expected.values, rtol=0, atol=1e-5)
        assert not top.logprobs[n, size:].any()
        assert not logprobs[n, size:].any()


def test_of_a_small_vocabulary_all_tokens_are_the_top(policy, batch):
    top = top_tokens(policy.body_and_head, batch, 1000, vocab_size=policy.body_and_head.vocab_size)
    total = top.logprobs.exp().sum(-1)[batch.completion_mask]
    torch.testing.assert_close(total, torch.ones_like(total))


def test_the_gradient_of_other_tokens_is_that_of_the_whole_model_in_chunks_without_logits(
    policy, batch
):
    model, saved = policy.body_and_head, []
    candidates = torch.arange(3).expand(*batch.completion_ids.shape, 3)
    weights = torch.tensor([1.0, -2.0, 0.5])
    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        _, logprobs = candidate_statistics(
            model, batch, candidates, temperature=0.7, chunk_logits=3 * model.vocab_size
        )
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == model.vocab_size]
    (logprobs * weights).sum().backward()
    ours = [p.grad.clone() for p in policy.trainable_parameters()]
    policy.zero_grad()
    rows = [unbatched_distributions(policy.model, batch, n)[:, :3] for n in range(4)]
    (torch.cat(rows) * weights).sum().backward()
    for one, parameter in zip(ours, policy.trainable_parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)


def test_chunks_do_not_change_the_gradient(policy, batch):
    gradients = []
    for chunk_tokens in (2, 1000):
        policy.zero_grad()
        logprobs, entropy = completion_statistics(
            policy.body_and_head,
            batch,
            entropy_gradient=True,
            chunk_logits=chunk_tokens * policy.body_and_head.vocab_size,
        )
        (logprobs.sum() - 0.5 * entropy.sum()).backward()
        gradients.append([p.grad.clone() for p in policy.trainable_parameters()])
    for small, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-5)


def test_the_entropy_carries_a_gradient_only_on_request(policy, batch):
    assert not completion_statistics(policy.body_and_head, batch).entropy.requires_grad
    requested = completion_statistics(policy.body_and_head, batch, entropy_gradient=True)
    assert requested.entropy.requires_grad


class CountingHead(BodyAndHead):
    """Record the largest number of tokens that the head ran on at once."""

    most_tokens = 0

    def logits(self, hidden_states, cast=None):
        self.most_tokens = max(self.most_tokens, len(hidden_states))
        return super().logits(hidden_states, cast)


def test_forward_and_backward_never_hold_more_logits_than_one_chunk(policy, batch):
    head = CountingHead(policy.model, use_packing=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        logprobs, _ = completion_statistics(head, batch, chunk_logits=3 * head.vocab_size)
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == head.vocab_size]
    logprobs.sum().backward()
    assert head.most_tokens == 3


def test_the_head_runs_once_per_hidden_state_that_rows_share(policy, batch):
    head = CountingHead(policy.model, use_packing=True)
    completion_statistics(head, batch)
    # Completions of three, one, two and five tokens: one hidden state predicts all first tokens.
    assert head.most_tokens == 1 + (3 - 1) + (1 - 1) + (2 - 1) + (5 - 1)


def test_the_entropy_with_impossible_tokens_is_finite(policy, batch):
    class Forbidding(BodyAndHead):
        def logits(self, hidden_states, cast=None):
            return super().logits(hidden_states, cast).index_fill(1, torch.tensor([0]), -torch.inf)

    model = Forbidding(policy.model, use_packing=True)
    logprobs, entropy = completion_statistics(model, batch, entropy_gradient=True)
    policy.zero_grad()
    (logprobs.sum() + entropy.sum()).backward()
    assert entropy.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in policy.trainable_parameters())
