"""Sampling with weights in oneDNN's layout against the layers' own products."""

import copy
import pickle
import threading

import pytest
import torch
from tiny import prompt, tiny_policy
from torch import nn

from lit_grpo.policy import LoRA
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.rollout.hf import blocked_weights
from lit_grpo.rollout.hf.blocked_weights import MAX_ROWS, MIN_TOKENS, BlockedWeights

pytestmark = pytest.mark.skipif(
    not blocked_weights.is_available(), reason="this build of torch has no oneDNN products"
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
    weights = BlockedWeights(model, MIN_TOKENS)
    for shape in [(1, 16), (3, 16), (16,), (2, 9, 16), (65, 16), (MAX_ROWS, 16)]:
        rows = torch.randn(shape)
        with torch.no_grad():
            expected = model(rows)
            with weights.used():
                found = model(rows)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(products) == 2 * 6


def test_many_rows_and_none_are_multiplied_by_the_layers(products):
    model = layers()
    weights = BlockedWeights(model, MIN_TOKENS)
    for shape in [(MAX_ROWS + 1, 16), (0, 16)]:
        rows = torch.randn(shape)
        with torch.no_grad(), weights.used():
            assert model(rows).shape == shape
    assert products == []


def test_few_numbers_of_rows_are_multiplied_since_code_is_kept_for_each(products):
    layer = nn.Linear(16, 8)
    weights = BlockedWeights(layer, MIN_TOKENS)
    with torch.no_grad(), weights.used():
        for rows in range(1, MAX_ROWS + 1):
            assert layer(torch.ones(rows, 16)).shape == (rows, 8)
    sizes = [shape[0] for shape in products]
    assert len(set(sizes)) < 40
    assert all(rows <= size <= 1.5 * rows for rows, size in enumerate(sizes, 1))


def test_the_layers_are_as_before_after_the_forward_pass_and_after_an_error():
    model = layers()
    weights = BlockedWeights(model, MIN_TOKENS)
    with pytest.raises(RuntimeError), torch.no_grad(), weights.used():
        model(torch.randn(2, 17))
    assert not any("forward" in vars(layer) for layer in model)
    rows = torch.randn(2, 16)
    model(rows).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_forward_pass_with_a_gradient_has_one(products):
    model = layers()
    weights = BlockedWeights(model, MIN_TOKENS)
    with weights.used():  # as another thread may meet it
        model(torch.randn(2, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert products == []


def test_weights_that_have_changed_are_used_as_they_are(products):
    for change in (
        lambda layer: layer.weight.zero_(),
        lambda layer: setattr(layer.weight, "data", torch.zeros(8, 16)),
    ):
        layer = nn.Linear(16, 8, bias=False)
        weights = BlockedWeights(layer, MIN_TOKENS)
        with torch.no_grad(), weights.used():
            change(layer)
            assert layer(torch.ones(1, 16)).tolist() == [[0.0] * 8]
    assert products == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_the_model_has_its_own_weights(copied):
    model = layers()
    with BlockedWeights(model, MIN_TOKENS).used():
        other = copied(model)
    with torch.no_grad():
        rows = torch.randn(2, 16)
        torch.testing.assert_close(other(rows), model(rows))
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(rows).any()
        assert model(rows).any()


def test_a_model_may_be_sampled_from_during_its_forward_pass():
    model = layers()
    with torch.no_grad(), BlockedWeights(model, MIN_TOKENS).used():
        inner = BlockedWeights(model, MIN_TOKENS)
        with inner.used():
            model(torch.randn(2, 16))
    assert not any("forward" in vars(layer) for layer in model)


def test_no_copies_are_made_for_few_tokens():
    assert BlockedWeights(layers(), MIN_TOKENS - 1)._forwards == []
    assert len(BlockedWeights(layers(), MIN_TOKENS)._forwards) == 2


class OwnLinear(nn.Linear):
    """A layer that may compute anything."""


def wrapped_forward() -> nn.Linear:
    layer = nn.Linear(16, 8)
    layer.forward = layer.forward
    return layer


def strided_bias() -> nn.Linear:
    layer = nn.Linear(16, 8)
    layer.bias = nn.Parameter(torch.randn(16)[::2])
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(nn.Linear(7, 9), id="small"),
        pytest.param(nn.Linear(16, 8, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(nn.Linear(16, 8, device="meta"), id="another device"),
        pytest.param(OwnLinear(16, 8), id="a subclass"),
        pytest.param(wrapped_forward(), id="a forward pass of its own"),
        pytest.param(strided_bias(), id="a bias with gaps"),
    ],
)
def test_other_layers_keep_their_products(layer, products):
    rows = torch.randn(2, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    own = dict(vars(layer))
    with torch.no_grad(), BlockedWeights(layer, MIN_TOKENS).used():
        layer(rows)
    assert products == []
    assert vars(layer).keys() == own.keys()


def test_a_shard_of_the_weights_is_no_matrix_to_multiply_with(products):
    layer = nn.Linear(16, 8)
    layer.weight = nn.Parameter(layer.weight.detach().flatten())
    assert BlockedWeights(layer, MIN_TOKENS)._forwards == []


def test_weights_are_cast_and_not_blocked_in_mixed_precision(products):
    model = layers()
    weights = BlockedWeights(model, MIN_TOKENS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), weights.used():
        assert model(torch.randn(2, 16)).dtype == torch.bfloat16
        assert BlockedWeights(model, MIN_TOKENS)._forwards == []
    assert products == []


def test_without_onednn_the_layers_multiply():
    with torch.backends.mkldnn.flags(enabled=False):
        assert BlockedWeights(layers(), MIN_TOKENS)._forwards == []


def sample(policy, seed=0):
    engine = HFEngine()
    engine.load_weights(policy, 0)
    prompts = [prompt("12+34=", id="a"), prompt("x", id="b")]
    return dict(engine.generate(prompts, 4, Sampling(max_tokens=MIN_TOKENS), seed=seed))


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
