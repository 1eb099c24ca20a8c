"""Bytes of models on the meta device: exact ones against real models, estimates by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiny import LLAMA, tiny_policy
from torch.optim import SGD, Adagrad, AdamW

from lit_grpo.cli.doctor.memory import (
    Transformer,
    activation_bytes,
    cache_bytes,
    copy_bytes,
    gradient_bytes,
    logit_bytes,
    mask_bytes,
    optimizer_bytes,
    sizes_of,
    weight_bytes,
)
from lit_grpo.policy import LoRA, Policy

ADAPTED = {"lora": LoRA(rank=4), "dtype": "bfloat16"}
SIZES = Transformer(
    num_layers=2,
    hidden_size=8,
    vocab_size=100,
    linear_values=160,
    kv_values=32,
    query_groups=2,
    caps_scores=False,
)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, ADAPTED])
def test_weights_and_gradients_are_those_of_the_loaded_model(settings):
    outline = Policy(architecture=LLAMA, **settings).outline()
    assert {one.device.type for one in outline.parameters()} == {"meta"}
    loaded = tiny_policy(**settings)
    parameters = list(loaded.model.parameters())
    sizes = [one.numel() * one.element_size() for one in parameters]
    buffers = [one.numel() * one.element_size() for one in loaded.model.buffers()]
    assert weight_bytes(outline) == sum(sizes) + sum(buffers)
    trained = zip(sizes, parameters, strict=True)
    assert gradient_bytes(outline) == sum(size for size, one in trained if one.requires_grad)


def test_a_saved_model_has_the_outline_of_what_is_loaded(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    assert weight_bytes(Policy(str(tmp_path)).outline()) == weight_bytes(tiny_policy().model)


@pytest.mark.parametrize(
    "make",
    [partial(AdamW, lr=1.0), partial(SGD, lr=1.0), partial(SGD, lr=1.0, momentum=0.9), Adagrad],
)
def test_the_state_of_the_optimizer_is_that_after_a_real_step(make):
    outline = Policy(architecture=LLAMA).outline()
    parameters = tiny_policy().trainable_parameters()
    optimizer = make(parameters)
    for one in parameters:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    real = sum(one.numel() * one.element_size() for one in states if torch.is_tensor(one))
    assert optimizer_bytes(outline, make) == real
    assert all(one.grad is None for one in outline.parameters())


class Reading(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        return [one.sum().item() for group in self.param_groups for one in group["params"]]


def test_an_optimizer_that_reads_values_is_taken_for_adam():
    outline = Policy(architecture=LLAMA).outline()
    assert optimizer_bytes(outline, Reading) == 2 * gradient_bytes(outline)


def test_the_sizes_are_those_of_the_config_with_and_without_an_adapter():
    sizes = sizes_of(Policy(architecture=LLAMA).outline())
    assert (sizes.num_layers, sizes.hidden_size, sizes.query_groups) == (2, 32, 2)
    assert sizes.kv_values == 2 * 2 * 2 * 8  # keys and values, layers, heads, their size
    # Queries, keys, values, output, gate, up and down of each layer.
    layer = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)
    assert sizes.linear_values == 2 * layer
    adapted = sizes_of(Policy(architecture=LLAMA, lora=LoRA(rank=4)).outline())
    assert adapted.kv_values == sizes.kv_values
    assert adapted.linear_values > sizes.linear_values


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer():
    assert activation_bytes(SIZES, 10, 4, checkpointing=False) == 10 * 4 * (2 * 80 + 80)
    assert activation_bytes(SIZES, 10, 4, checkpointing=True) == 10 * 4 * (2 * 8 + 80)


def test_a_mask_has_a_number_for_each_query_and_key():
    mask = 3 * 5 * 7 * 2  # rows, queries, keys, query heads of a key head
    assert mask_bytes(SIZES, 3, 5, 7, 4) == mask * 4


def test_copied_keys_and_values_are_those_of_every_row():
    assert copy_bytes(SIZES, 3, 7, 4, checkpointing=False) == 32 * 3 * 7 * 4
    assert copy_bytes(SIZES, 3, 7, 4, checkpointing=True) == 32 * 3 * 7 * 4 // 2


def test_logits_exist_in_chunks():
    assert logit_bytes(10, 100) == 4 * 4 * 1000
    assert logit_bytes(10**6, 150_000) == 4 * 4 * 2**26


def test_the_cache_has_keys_and_values_of_every_token():
    assert cache_bytes(SIZES, 3, 7, 2) == 32 * 3 * 7 * 2
