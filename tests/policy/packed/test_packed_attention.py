"""Whole models with merged attention, and how it is decided whether to use it."""

import logging

import flash_on_cpu
import pytest
import torch
from prefix_trees import pack_of, random_states
from rows_alone import ARCHITECTURES, assert_same_as_alone, some_batch
from tiny import tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.policy.packed import packed_attention
from lit_grpo.policy.packed.packed_attention import _agrees

CAPPED = {"gemma2"}


@pytest.fixture
def merges(monkeypatch):
    """Merge on the CPU in any precision; return the list of the windows of merged layers."""
    flash_on_cpu.install()
    windows = []
    merged = packed_attention.merged_attention

    def recorded(*args, window, **options):
        windows.append(window)
        return merged(*args, window=window, **options)

    monkeypatch.setattr(packed_attention, "_can_merge", lambda *_: True)
    monkeypatch.setattr(packed_attention, "merged_attention", recorded)
    return windows


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_gives_the_logprobs_and_gradients_of_each_row_alone(merges, name):
    policy = tiny_policy(architecture=ARCHITECTURES[name])
    assert policy.body_and_head.uses_packing
    for seed in range(3):
        assert_same_as_alone(policy, some_batch(seed))
    assert bool(merges) is (name not in CAPPED)
    if "sliding_window" in ARCHITECTURES[name] and name not in CAPPED:
        assert 5 in merges


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"lora": LoRA(rank=4), "gradient_checkpointing": True},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_merging_works_with_the_settings_of_the_policy(merges, settings):
    if "dtype" in settings:
        policy = tiny_policy()
        policy.model.double()
    else:
        policy = tiny_policy(**settings)
    assert_same_as_alone(policy, some_batch(1))
    assert merges


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_and_under_autocast_a_gpu_merges(monkeypatch, merges, name, autocast):
    """Decide as on a GPU; the norm of queries in Qwen 3 leaves them in float32 under autocast."""
    monkeypatch.undo()
    flash_on_cpu.install()
    monkeypatch.setattr(packed_attention, "FLASH_DEVICES", {"cpu"})
    dtypes = []
    merged = packed_attention.merged_attention
    monkeypatch.setattr(
        packed_attention,
        "merged_attention",
        lambda *args, **options: dtypes.append(args[0].dtype) or merged(*args, **options),
    )
    policy = tiny_policy(
        architecture=ARCHITECTURES[name], dtype="float32" if autocast else "bfloat16"
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same_as_alone(policy, some_batch(), tolerance=0.05)
    assert set(dtypes) == {torch.bfloat16}


@pytest.fixture
def fresh():
    """Forget which kinds of tensors have been tried, before and afterwards."""
    _agrees.cache_clear()
    yield
    _agrees.cache_clear()


@pytest.fixture
def decide(monkeypatch, fresh):
    """Return whether attention merges on a device that may have FlashAttention."""
    flash_on_cpu.install()
    monkeypatch.setattr(packed_attention, "FLASH_DEVICES", {"cpu"})

    def _decide(heads=4, kv_heads=2, *, size=8, dtype=torch.bfloat16):
        states = random_states(pack_of([([1], [[2]])]), heads, kv_heads, size=size, dtype=dtype)
        return packed_attention._can_merge(*states)

    return _decide


def test_flash_attention_is_used_for_16_bits_and_heads_that_it_takes(decide):
    assert decide()
    assert decide(dtype=torch.float16, size=256)
    assert not decide(dtype=torch.float32)
    assert not decide(size=12)
    assert not decide(size=264)


@pytest.mark.parametrize(
    "heads", [(14, 2, 64), (12, 2, 128), (32, 8, 128), (8, 4, 256), (9, 3, 64), (1, 1, 16)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_against_it(monkeypatch, heads, dtype):
    flash_on_cpu.install()
    differences = []
    difference = packed_attention._difference

    def recorded(*tensors):
        differences.append(difference(*tensors))
        return differences[-1]

    monkeypatch.setattr(packed_attention, "_difference", recorded)
    assert packed_attention._disagreement(torch.device("cpu"), dtype, *heads) is None
    assert len(differences) == 8  # values and three gradients, without and with a window
    assert 0 < max(differences) < 0.01  # a fifth of what is allowed


def test_a_cpu_runs_blocks(fresh):
    states = random_states(pack_of([([1], [[2]])]), dtype=torch.bfloat16)
    assert not packed_attention._can_merge(*states)


def fail(*args):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def test_a_gpu_without_it_runs_blocks_with_a_warning(decide, monkeypatch, caplog):
    monkeypatch.setattr("lit_grpo.policy.packed.merged_attention._attend", fail)
    with caplog.at_level(logging.WARNING, "lit_grpo"):
        assert not decide()
        assert not decide()
    (record,) = caplog.records
    assert "Ampere" in record.getMessage()


@pytest.mark.parametrize("what", ["values", "gradients"])
def test_a_kernel_that_computes_something_else_is_not_used(decide, monkeypatch, caplog, what):
    from lit_grpo.policy.packed import merged_attention as module

    name = {"values": "_attend", "gradients": "_gradients"}[what]
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: tuple(1.5 * one for one in right(*args)))
    with caplog.at_level(logging.WARNING, "lit_grpo"):
        assert not decide()
    assert "it differs by" in caplog.records[0].getMessage()


def test_the_first_try_is_not_disturbed_by_what_autograd_does_meanwhile(decide):
    def refuse(tensor):
        raise AssertionError("a tensor of the try was kept by the model's hooks")

    hooks = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    device = torch.device("meta")
    with torch.inference_mode(), torch.autocast("cpu", torch.float16), device, hooks:
        assert _agrees(torch.device("cpu"), torch.bfloat16, 4, 2, 8)
