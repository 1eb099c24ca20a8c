import pytest
import torch
from tiny import completion, rollouts, tiny_policy

from lit_grpo.batching import collate_rollouts
from lit_grpo.logprobs import completion_statistics


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def ragged_batch():
    completions = [
        [completion([7, 8, 9]), completion([1])],
        [completion([2, 3]), completion([4, 5, 6, 7, 8])],
    ]
    batch = rollouts([[0, 1], [1, 0]], completions)
    return collate_rollouts(batch, batch.rewards, pad_id=0, overlong_filtering=False), completions


def unpadded_logprobs(policy, prompt, ids, temperature):
    """The plain way: one row, no padding, all logits at once."""
    logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0], logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_padded_and_chunked_logprobs_are_those_of_each_row_alone(policy, temperature, chunk_tokens):
    batch, completions = ragged_batch()
    got, entropy = completion_statistics(
        policy.causal_model, batch, temperature=temperature, chunk_tokens=chunk_tokens
    )
    flat = [row for group in completions for row in group]
    for n, row in enumerate(flat):
        prompt = list(b"1+1=")
        expected, full = unpadded_logprobs(policy, prompt, row.token_ids, temperature)
        size = len(row.token_ids)
        torch.testing.assert_close(got[n, :size], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            entropy[n, :size], -(full.exp() * full).sum(1), rtol=0, atol=1e-4
        )
        assert not got[n, size:].any()


def test_chunks_do_not_change_the_gradient(policy):
    batch, _ = ragged_batch()
    gradients = []
    for chunk_tokens in (2, 1000):
        policy.zero_grad()
        logprobs, entropy = completion_statistics(
            policy.causal_model, batch, entropy_gradient=True, chunk_tokens=chunk_tokens
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


class LargestHead:
    """Passes everything on and remembers how many tokens the head saw at once."""

    def __init__(self, model):
        self.model, self.most = model, 0
        self.hidden_states = model.hidden_states

    def logits(self, hidden_states):
        self.most = max(self.most, len(hidden_states))
        return self.model.logits(hidden_states)


def test_no_more_logits_than_a_chunk_exist_in_forward_or_backward(policy):
    batch, _ = ragged_batch()
    head = LargestHead(policy.causal_model)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        logprobs, _ = completion_statistics(head, batch, chunk_tokens=3)
    vocabulary = policy.model.config.vocab_size
    assert not [shape for shape in saved if len(shape) > 1 and shape[-1] == vocabulary]
    logprobs.sum().backward()
    assert head.most == 3
