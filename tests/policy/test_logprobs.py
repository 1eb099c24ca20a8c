import pytest
import torch
from tiny import alone, completion, rollouts, tiny_policy

from lit_grpo.policy.body_and_head import BodyAndHead
from lit_grpo.policy.logprobs import completion_statistics
from lit_grpo.training.batching import collate_rollouts


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def ragged_batch():
    completions = [
        [completion([7, 8, 9]), completion([1])],
        [completion([2, 3]), completion([4, 5, 6, 7, 8])],
    ]
    batch = rollouts([[0, 1], [1, 0]], completions)
    return collate_rollouts(batch, pad_id=0, overlong_filtering=False), completions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("packs", [True, False])
def test_packed_padded_and_chunked_logprobs_are_those_of_each_row_alone(
    policy, temperature, chunk_tokens, packs
):
    batch, completions = ragged_batch()
    model = BodyAndHead(policy.model, packs=packs)
    got, entropy = completion_statistics(
        model, batch, temperature=temperature, chunk_logits=chunk_tokens * model.vocab_size
    )
    flat = [row for group in completions for row in group]
    for n, row in enumerate(flat):
        expected, expected_entropy = alone(policy.model, batch, n, temperature)
        size = len(row.token_ids)
        torch.testing.assert_close(got[n, :size], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy[n, :size], expected_entropy, rtol=0, atol=1e-4)
        assert not got[n, size:].any()


def test_chunks_do_not_change_the_gradient(policy):
    batch, _ = ragged_batch()
    gradients = []
    for chunk_tokens in (2, 1000):
        policy.zero_grad()
        logprobs, entropy = completion_statistics(
            policy.causal_model,
            batch,
            entropy_gradient=True,
            chunk_logits=chunk_tokens * policy.causal_model.vocab_size,
        )
        (logprobs.sum() - 0.5 * entropy.sum()).backward()
        gradients.append([p.grad.clone() for p in policy.trainable_parameters()])
    for small, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(small, whole, rtol=1e-4, atol=1e-5)


def test_the_entropy_carries_a_gradient_only_when_asked_to(policy):
    batch, _ = ragged_batch()
    assert not completion_statistics(policy.causal_model, batch).entropy.requires_grad
    asked = completion_statistics(policy.causal_model, batch, entropy_gradient=True)
    assert asked.entropy.requires_grad


class LargestHead(BodyAndHead):
    """Remembers how many tokens the head saw at once."""

    most = 0

    def logits(self, hidden_states):
        self.most = max(self.most, len(hidden_states))
        return super().logits(hidden_states)


def test_no_more_logits_than_a_chunk_exist_in_forward_or_backward(policy):
    batch, _ = ragged_batch()
    head = LargestHead(policy.model, packs=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        logprobs, _ = completion_statistics(head, batch, chunk_logits=3 * head.vocab_size)
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == head.vocab_size]
    logprobs.sum().backward()
    assert head.most == 3


def test_the_head_runs_once_for_the_rows_that_begin_alike(policy):
    head = LargestHead(policy.model, packs=True)
    batch, _ = ragged_batch()
    completion_statistics(head, batch)
    # One prompt and three, one, two and five tokens: the first are predicted by the same token.
    assert head.most == 1 + (3 - 1) + (1 - 1) + (2 - 1) + (5 - 1)


def test_an_entropy_of_impossible_tokens_is_finite(policy):
    class Forbidding(BodyAndHead):
        def logits(self, hidden_states):
            return super().logits(hidden_states).index_fill(1, torch.tensor([0]), -torch.inf)

    model = Forbidding(policy.model, packs=True)
    logprobs, entropy = completion_statistics(model, ragged_batch()[0], entropy_gradient=True)
    policy.zero_grad()
    (logprobs.sum() + entropy.sum()).backward()
    assert entropy.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in policy.trainable_parameters())
