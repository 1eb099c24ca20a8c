"""What a reference is made of; tests/policy/test_policy.py runs it."""

import pytest
import torch
from tiny import tiny_policy
from torch import nn

from lit_grpo.policy.reference import frozen_copy, frozen_values, move_towards, swapped


@pytest.fixture
def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))]


def test_a_copy_has_the_weights_or_only_their_shapes():
    model = tiny_policy().model
    whole, empty = (frozen_copy(model, has_weights=value) for value in (True, False))
    for weight, copied, shape in zip(*(m.parameters() for m in (model, whole, empty)), strict=True):
        assert torch.equal(weight, copied)
        assert copied.data_ptr() != weight.data_ptr()
        assert shape.shape == weight.shape
        assert not copied.requires_grad
        assert not shape.requires_grad
    assert all(weight.requires_grad for weight in model.parameters())


def test_values_are_swapped_within_the_context_only_also_after_an_error(weights):
    values = frozen_values(weights)
    with torch.no_grad():
        weights[0].add_(10)

    def fail_inside() -> None:
        with swapped(weights, values):
            assert weights[0].tolist() == [1.0, 2.0]
            assert [*values.buffers()][0].tolist() == [11.0, 12.0]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert weights[0].tolist() == [11.0, 12.0]
    assert [one.tolist() for one in values.buffers()] == [[1.0, 2.0], [[3.0]]]


def test_a_reference_moves_by_the_share_of_the_policy(weights):
    values = frozen_values(weights)
    with torch.no_grad():
        weights[1].fill_(7.0)
    move_towards(weights, values.buffers(), mix=0.25)
    assert [one.tolist() for one in values.buffers()] == [[1.0, 2.0], [[4.0]]]
