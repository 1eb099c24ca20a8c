"""Bytes of models on the meta device: against those of real models."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
from needs import needs_torchao
from tiny import LLAMA, tiny_policy
from torch.optim import SGD, Adagrad, AdamW

from lit_grpo.cli.estimate.model_sizes import (
    build_optimizer,
    gradient_bytes,
    optimizer_sizes,
    sizes_of,
    weight_bytes,
)
from lit_grpo.policy import LoRA, Policy
from lit_grpo.rollout.hf import blocked_weights
from lit_grpo.training import MasterAdamW

ADAPTED = {"lora": LoRA(rank=4), "dtype": "bfloat16"}


def sizes_after_a_step(outline, make):
    return optimizer_sizes(outline, build_optimizer(outline, make))


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
    assert sizes_after_a_step(outline, make).state_bytes == real
    assert all(one.grad is None for one in outline.parameters())


@pytest.mark.parametrize("fused", [None, True])
def test_float32_masters_of_bfloat16_weights_are_state_and_gradients_a_part_at_a_time(fused):
    outline = Policy(architecture=LLAMA, dtype="bfloat16").outline()
    parameters = tiny_policy(dtype="bfloat16").trainable_parameters()
    optimizer = MasterAdamW(parameters, fused=fused)
    for one in parameters:
        one.grad = torch.zeros_like(one)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    number = sum(one.numel() for one in parameters)
    sizes = sizes_after_a_step(outline, partial(MasterAdamW, fused=fused))
    assert sizes.state_bytes == sum(one.numel() * one.element_size() for one in states)
    assert sizes.state_bytes == 12 * number + 4 * len(parameters)
    assert (sizes.copies, sizes.step_bytes) == (False, 4 * number if fused else 8 * number)


@needs_torchao
@pytest.mark.parametrize("name", ["AdamW8bit", "_AdamW"])
def test_the_state_of_an_optimizer_of_torchao_is_that_of_its_tensors(name):
    torchao = importlib.import_module("torchao.optim")
    settings = {"hidden_size": 128, "intermediate_size": 256}
    outline = Policy(architecture=LLAMA | settings, dtype="bfloat16").outline()
    number = sum(one.numel() for one in outline.parameters())
    sizes = sizes_after_a_step(outline, getattr(torchao, name))
    per_parameter = {"AdamW8bit": 2, "_AdamW": 4}[name]
    assert sizes.state_bytes == pytest.approx(per_parameter * number, rel=0.1)  # scales and maps
    assert not sizes.copies


class Reading(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        return [one.sum().item() for group in self.param_groups for one in group["params"]]


def test_an_optimizer_that_reads_values_is_taken_for_adam():
    outline = Policy(architecture=LLAMA).outline()
    assert sizes_after_a_step(outline, Reading).state_bytes == 2 * gradient_bytes(outline)


class ReadingWhenMade(Reading):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.step()


def test_an_optimizer_that_cannot_be_made_without_values_is_taken_for_adam():
    outline = Policy(architecture=LLAMA).outline()
    assert build_optimizer(outline, ReadingWhenMade) is None
    assert sizes_after_a_step(outline, ReadingWhenMade).state_bytes == 2 * gradient_bytes(outline)


def test_the_sizes_are_those_of_the_config_with_and_without_an_adapter():
    sizes = sizes_of(Policy(architecture=LLAMA).outline())
    assert (sizes.num_layers, sizes.hidden_size, sizes.query_groups) == (2, 32, 2)
    assert sizes.kv_values == 2 * 2 * 2 * 8  # keys and values, layers, heads, their size
    # Queries, keys, values, output, gate, up and down of each layer.
    layer = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 64)
    assert sizes.linear_values == 2 * layer
    adapted = sizes_of(Policy(architecture=LLAMA, lora=LoRA(rank=4)).outline())
    assert adapted.kv_values == sizes.kv_values
    assert adapted.linear_values == sizes.linear_values + 2 * 7 * 4  # the rank of each adapter
    assert adapted.adapted_values == 2 * (6 * 32 + 64)
    assert (sizes.inner_values, sizes.adapted_values) == (2 * 64, 0)


def test_large_linear_layers_are_those_of_which_a_cpu_copies_the_weights(monkeypatch):
    monkeypatch.setattr(blocked_weights, "MIN_WEIGHTS", 32 * 64)
    architecture = LLAMA | {"vocab_size": 300}
    for settings in ({}, {"tie_word_embeddings": True}):
        sizes = sizes_of(Policy(architecture=architecture | settings).outline())
        # Gate, up and down of two layers, and the head, which has a copy also if it is tied.
        assert sizes.large_linear_parameters == 2 * 3 * 32 * 64 + 300 * 32
        policy = tiny_policy(architecture=architecture | settings)
        assert len(blocked_weights.BlockedWeights(policy.model, 32)._forwards) == 7


def test_parameters_are_counted_by_where_they_are():
    sizes = sizes_of(Policy(architecture=LLAMA | {"vocab_size": 300}).outline())
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    assert sizes.linear_parameters == 2 * layer
    assert sizes.layer_parameters == layer + 2 * 32  # two norms
    assert sizes.outer_parameters == 2 * 300 * 32 + 32
    assert sizes.parameters == sizes.trained_parameters == 2 * (layer + 64) + 2 * 300 * 32 + 32
    assert (sizes.parameter_bytes, sizes.largest_tensor) == (4, 300 * 32)
    tied = Policy(architecture=LLAMA | {"vocab_size": 300, "tie_word_embeddings": True})
    assert sizes.read_parameters == sizes_of(tied.outline()).read_parameters
    assert sizes.read_parameters == 2 * (layer + 64) + 300 * 32


class AdamW8bit(Reading):
    """Like that of bitsandbytes, it needs values."""


def test_an_8_bit_optimizer_has_two_bytes_for_each_parameter():
    outline = Policy(architecture=LLAMA).outline()
    assert sizes_after_a_step(outline, AdamW8bit).state_bytes == 2 * gradient_bytes(outline) // 4


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (partial(AdamW, lr=1.0), True),
        (partial(AdamW, lr=1.0, foreach=False), False),
        (partial(AdamW, lr=1.0, fused=True), False),
        (AdamW8bit, False),
    ],
)
def test_only_an_optimizer_that_runs_on_all_tensors_at_once_copies_them(make, copies):
    assert sizes_after_a_step(Policy(architecture=LLAMA).outline(), make).copies == copies
