"""Logprobs of chosen tokens, entropies and their gradients, compared with plain autograd."""

import pytest
import torch

from lit_grpo.policy import chosen_logprobs as module
from lit_grpo.policy.chosen_logprobs import chosen_logprobs

WHICH = torch.tensor([0, 2, 2, 4, 1, 2])
IDS = torch.tensor([[3, 1], [0, 0], [6, 2], [5, 3], [1, 6], [0, 4]])
"""Row 2 has three tokens, two of them the same; row 3 has none."""
OF_LOGPROBS = torch.linspace(-1, 2, 12).view(6, 2)
OF_ENTROPY = torch.tensor([0.5, -1.0, 2.0, 0.25, 0.0])


def made_logits(*, impossible: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, and [5, 7] logits by an operation that does not need its result again."""
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = values * 3.0
    return values, logits.index_fill(1, torch.tensor([2]), -torch.inf) if impossible else logits


def plainly(logits):
    """Return the same as `chosen_logprobs` by torch's own functions."""
    log_probabilities = logits.log_softmax(-1)
    finite = log_probabilities.clamp(min=-1e30)
    entropy = -(log_probabilities.exp() * finite).sum(-1)
    return log_probabilities[WHICH[:, None], IDS], entropy


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("cached", [1, 15, 1000], ids="{} logits in the cache".format)
def test_values_and_gradients_are_those_of_autograd(entropy_gradient, cached, monkeypatch):
    monkeypatch.setattr(module, "CACHED_LOGITS", cached)
    results = []
    for function in (
        plainly,
        lambda x: chosen_logprobs(x, WHICH, IDS, entropy_gradient=entropy_gradient),
    ):
        values, logits = made_logits()
        logprobs, entropy = function(logits)
        loss = (logprobs * OF_LOGPROBS).sum()
        if entropy_gradient:
            loss = loss + (entropy * OF_ENTROPY).sum()
        loss.backward()
        results.append((logprobs.detach(), entropy.detach(), values.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_token_of_probability_0_adds_nothing_to_entropy_and_gradient():
    values, logits = made_logits(impossible=True)
    ids = IDS.masked_fill(IDS == 2, 0)
    logprobs, entropy = chosen_logprobs(logits, WHICH, ids, entropy_gradient=True)
    (logprobs.sum() + entropy.sum()).backward()
    assert values.grad.isfinite().all()
    assert not values.grad[:, 2].any()
    rest = made_logits()[1].detach()[:, [0, 1, 3, 4, 5, 6]].log_softmax(-1)
    torch.testing.assert_close(entropy.detach(), -(rest.exp() * rest).sum(-1))


def test_no_further_tensor_of_their_size_is_kept_or_made_for_the_gradient():
    values, logits = made_logits()
    place, kept = logits.data_ptr(), []
    gradients = []
    logits.register_hook(lambda grad: gradients.append(grad.data_ptr()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logprobs, _ = chosen_logprobs(logits, WHICH, IDS, entropy_gradient=False)
    assert [one.data_ptr() for one in kept if one.shape == logits.shape] == [place]
    logprobs.sum().backward()
    assert gradients == [place]


def test_a_second_backward_pass_through_what_was_overwritten_is_an_error():
    _, logits = made_logits()
    logprobs, _ = chosen_logprobs(logits, WHICH, IDS, entropy_gradient=False)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_without_a_request_the_entropy_carries_no_gradient():
    for requested in (False, True):
        _, entropy = chosen_logprobs(made_logits()[1], WHICH, IDS, entropy_gradient=requested)
        assert entropy.requires_grad is requested
