from functools import partial

import pytest
import torch
from needs import needs_deepspeed
from tiny import LLAMA, tiny_policy
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from lit_grpo.distributed.deepspeed_compile import (
    _compiled_without_cache,
    _require_gradient,
    compile_layers,
)
from lit_grpo.policy.body_and_head import num_compilations
from lit_grpo.types import UserError


@pytest.fixture
def body(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    policy = tiny_policy(architecture=LLAMA | {"num_hidden_layers": 3})
    yield policy.model.get_decoder()
    torch.compiler.reset()


@needs_deepspeed
def test_layers_share_their_program_and_are_not_compiled_while_they_sample(body):
    ids = torch.arange(12).reshape(2, 6)
    expected = body(ids, use_cache=False).last_hidden_state
    before = num_compilations()
    compile_layers(body)
    assert body(ids).last_hidden_state.equal(expected)  # with a cache
    assert num_compilations() == before
    compiled = body(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(compiled, expected)
    assert num_compilations() == before + 1


@needs_deepspeed
def test_the_input_of_the_first_layer_has_a_gradient_though_embeddings_are_frozen(body):
    compile_layers(body)
    body.requires_grad_(False)
    ids = torch.arange(6)[None]
    body.layers[-1].mlp.up_proj.weight.requires_grad_()
    inputs = []
    body.layers[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    body(ids, use_cache=False).last_hidden_state.sum().backward()
    assert inputs[0].grad is not None
    with torch.no_grad():
        body(ids, use_cache=False)
    assert not inputs[1].requires_grad


@needs_deepspeed
def test_a_cache_may_be_positional(body):
    compiled = _compiled_without_cache(lambda states, cache=None: (states, cache))
    before = num_compilations()
    compiled(torch.ones(2), DynamicCache())
    assert num_compilations() == before


@needs_deepspeed
def test_layers_that_cannot_be_compiled_by_themselves_are_refused(body, monkeypatch):
    body.layers[2].mlp.up_proj.weight = body.layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match="compile must be false for LlamaModel.*share weights"):
        compile_layers(body)
    body._no_split_modules = []
    with pytest.raises(UserError, match="does not say which of its parts are layers"):
        compile_layers(body)


@needs_deepspeed
def test_layers_are_not_recomputed_outside_of_their_compiled_pass(body, monkeypatch):
    body.gradient_checkpointing_enable()
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", torch.nn.Module.__call__)
    with pytest.raises(UserError, match="with gradient_checkpointing it needs a newer"):
        compile_layers(body)


def test_tokens_and_states_with_a_gradient_stay_as_they_are():
    tokens = torch.arange(3)
    assert _require_gradient(torch.nn.Identity(), (tokens,)) == (tokens,)
    states = torch.ones(2, requires_grad=True) * 2
    assert _require_gradient(torch.nn.Identity(), (states, 3)) == (states, 3)
