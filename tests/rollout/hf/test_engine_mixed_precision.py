"""Sampling in mixed precision, in which every layer casts its weights."""

from contextlib import nullcontext

import pytest
import torch
from tiny import prompt, tiny_policy
from torch.utils._python_dispatch import TorchDispatchMode

from lit_grpo.rollout import HFEngine, Sampling

PROMPTS = [prompt("12+34=", id="a"), prompt("x", id="b")]
PLAIN = Sampling(max_tokens=12)


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def generate(policy, sampling=PLAIN):
    engine = HFEngine()
    engine.load_weights(policy, 0)
    return dict(engine.generate(PROMPTS, 4, sampling, seed=0))


def casts_of_weights(policy, num_tokens: int, autocast) -> int:
    """Return how many weights are cast to bfloat16 while completions are sampled."""
    shapes = {(p.shape, p.dtype) for p in policy.model.parameters() if p.dim() == 2}
    count = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            nonlocal count
            is_cast = operator is torch.ops.aten._to_copy.default
            count += is_cast and (args[0].shape, args[0].dtype) in shapes
            return operator(*args, **kwargs or {})

    with autocast, Count():
        generate(policy, Sampling(max_tokens=num_tokens, min_tokens=num_tokens))
    return count


def mixed_precision():
    """Return autocast as Lightning uses it."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def test_weights_are_cast_once_for_all_tokens_in_mixed_precision(policy):
    num_weights = sum(p.dim() == 2 for p in policy.model.parameters()) - 1  # the embedding is not
    assert casts_of_weights(policy, 2, mixed_precision()) == num_weights
    assert casts_of_weights(policy, 6, mixed_precision()) == num_weights
    assert casts_of_weights(policy, 6, nullcontext()) == 0


def test_weights_that_have_changed_are_cast_again():
    policy = tiny_policy()
    with mixed_precision():
        before = generate(policy)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.5)
        after = generate(policy)
        assert not torch.is_autocast_cache_enabled()
    assert before != after
    with mixed_precision():
        assert generate(policy) == after


def test_a_generation_that_is_left_keeps_no_cast_weights():
    policy, engine = tiny_policy(), HFEngine()
    engine.load_weights(policy, 0)
    sampling = Sampling(max_tokens=12, stop_token_ids=tuple(range(60)))
    with mixed_precision():
        expected = generate(policy, sampling)
    with mixed_precision():
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(2.0)
        rows = engine.generate(PROMPTS, 4, sampling, seed=0)
        next(rows)
        rows.close()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(0.5)  # exact
        assert generate(policy, sampling) == expected
