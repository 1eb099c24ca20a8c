"""Under autocast the head's weight is cast once, and its gradient is added in float32."""

import pytest
import torch
from packed_batches import batch_of
from tiny import LLAMA, tiny_policy
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_grpo.policy.body_and_head import BodyAndHead
from lit_grpo.policy.cast_head import cast_weight
from lit_grpo.policy.logprobs import completion_statistics

BATCH = batch_of([49, 43, 49, 61], [[7, 8, 9], [1]], [5, 6], [[2, 3], [4, 5, 6, 7, 8]])


class CountCasts(TorchDispatchMode):
    """Count the casts of tensors of a shape to bfloat16."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += kwargs.get("dtype") is torch.bfloat16
        return operator(*args, **kwargs)


class CastsEachTime(BodyAndHead):
    def cast_head(self):
        return None


def run(policy, kind, *, grad: bool = True):
    """Return how often the head was cast, logprobs and gradients, with chunks of two tokens."""
    model = kind(policy.model, use_packing=True)
    policy.zero_grad()
    casts = CountCasts(policy.model.get_output_embeddings().weight.shape)
    with casts, torch.set_grad_enabled(grad):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            logprobs, _ = completion_statistics(model, BATCH, chunk_logits=2 * model.vocab_size)
        if grad:
            (logprobs * torch.linspace(-1, 1, logprobs.shape[1])).sum().backward()
    gradients = [one.grad for one in policy.trainable_parameters()]
    return casts.count, logprobs, gradients


@pytest.mark.parametrize("tied", [False, True])
def test_the_weight_is_cast_once_and_all_numbers_are_those_of_a_cast_for_each_chunk(tied):
    policy = tiny_policy(architecture=LLAMA | {"tie_word_embeddings": tied})
    count, logprobs, gradients = run(policy, BodyAndHead)
    assert count == 1
    often, expected, expected_gradients = run(policy, CastsEachTime)
    assert often > 2
    assert logprobs.equal(expected)
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert one.dtype == torch.float32
        assert one.equal(other)


def test_without_a_gradient_the_weight_is_cast_once():
    count, logprobs, _ = run(policy := tiny_policy(), BodyAndHead, grad=False)
    assert count == 1
    assert logprobs.equal(run(policy, CastsEachTime, grad=False)[1])


def test_a_frozen_head_gets_no_gradient():
    policy = tiny_policy()
    head = policy.model.get_output_embeddings()
    head.weight.requires_grad_(False)
    _, _, gradients = run(policy, BodyAndHead)
    assert head.weight.grad is None
    assert all(one is not None for one in gradients)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (nn.Linear(4, 8, bias=False), True),
        (nn.Linear(4, 8), False),
        (nn.Linear(4, 8, bias=False, dtype=torch.bfloat16), False),
        (nn.Sequential(nn.Linear(4, 8, bias=False)), False),
    ],
    ids=["plain", "bias", "16 bits", "wrapped"],
)
def test_only_a_plain_head_in_float32_is_cast_here(head, expected):
    with torch.autocast("cpu", torch.bfloat16):
        assert (cast_weight(head) is not None) is expected
    assert cast_weight(head) is None
