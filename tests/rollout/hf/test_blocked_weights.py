"""Sampling with weights in oneDNN's layout against the layers' own products."""

import copy
import threading

import pytest
import torch
from tiny import prompt, tiny_policy
from torch import nn

from lit_grpo.policy import LoRA
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.rollout.hf import blocked_weights
from lit_grpo.rollout.hf.blocked_weights import BlockedWeights

pytestmark = pytest.mark.skipif(
    not blocked_weights._is_available(), reason="this build of torch has no oneDNN products"
)


@pytest.fixture(autouse=True)
def _small_layers_too(monkeypatch):
    monkeypatch.setattr(blocked_weights, "MIN_WEIGHTS", 64)


@pytest.fixture
def products(monkeypatch):
    """Return the shapes of the rows that were multiplied with blocked weights."""
    shapes, product = [], blocked_weights._product

    def counted(input, *rest):
        shapes.append(tuple(input.shape))
        return product(input, *rest)

    monkeypatch.setattr(blocked_weights, "_product", counted)
    return shapes


def layers(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8, **options), nn.SiLU(), nn.Linear(8, 16, bias=False))


def test_products_are_those_of_the_layers_for_any_number_of_rows(products):
    model = layers()
    weights = BlockedWeights(model)
    for shape in [(1, 16), (5, 16), (2, 3, 16), (0, 16)]:
        rows = torch.randn(shape)
        with torch.no_grad():
            expected = model(rows)
            with weights.used():
                found = model(rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(products) == 8


def test_the_layers_are_as_before_after_the_forward_pass_and_after_an_error():
    model = layers()
    weights = BlockedWeights(model)
    with pytest.raises(RuntimeError), torch.no_grad(), weights.used():
        model(torch.randn(2, 17))
    assert not any("forward" in vars(layer) for layer in model)
    rows = torch.randn(2, 16)
    model(rows).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class OwnLinear(nn.Linear):
    """A layer that may compute anything."""


def wrapped_forward() -> nn.Linear:
    layer = nn.Linear(16, 8)
    layer.forward = layer.forward
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(nn.Linear(7, 9), id="small"),
        pytest.param(nn.Linear(16, 8, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(nn.Linear(16, 8, device="meta"), id="another device"),
        pytest.param(OwnLinear(16, 8), id="a subclass"),
        pytest.param(wrapped_forward(), id="a forward pass of its own"),
    ],
)
def test_other_layers_keep_their_products(layer, products):
    rows = torch.randn(2, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    own = dict(vars(layer))
    with torch.no_grad(), BlockedWeights(layer).used():
        layer(rows)
    assert products == []
    assert vars(layer).keys() == own.keys()


def test_a_shard_of_the_weights_is_no_matrix_to_multiply_with(products):
    layer = nn.Linear(16, 8)
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    assert BlockedWeights(layer)._forwards == []


def test_weights_are_cast_and_not_blocked_in_mixed_precision(products):
    model = layers()
    weights = BlockedWeights(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), weights.used():
        assert model(torch.randn(2, 16)).dtype == torch.bfloat16
    assert products == []


def sample(policy, seed=0):
    engine = HFEngine()
    engine.load_weights(policy, 0)
    prompts = [prompt("12+34=", id="a"), prompt("x", id="b")]
    return dict(engine.generate(prompts, 4, Sampling(max_tokens=12), seed=seed))


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["whole", "lora"])
def test_completions_are_those_of_the_layers_own_products(lora, products, monkeypatch):
    policy = tiny_policy(lora=lora)
    blocked = sample(policy)
    assert products
    monkeypatch.setattr(blocked_weights, "MIN_WEIGHTS", 2**60)
    own = sample(policy)
    for row, completion in own.items():
        assert blocked[row].token_ids == completion.token_ids
        assert blocked[row].sampler_logprobs == pytest.approx(completion.sampler_logprobs, abs=1e-5)


def test_each_rollout_samples_with_the_weights_as_they_are_then():
    policy = tiny_policy()
    before = sample(policy)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.neg_()
    changed = sample(policy)
    assert changed != before
    assert sample(copy.deepcopy(policy)) == changed


def test_rollouts_of_one_model_in_two_threads_are_those_of_one_thread():
    policy = tiny_policy()
    alone = [sample(policy, seed) for seed in range(4)]
    together = [None] * 4

    def run(seed):
        together[seed] = sample(policy, seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
