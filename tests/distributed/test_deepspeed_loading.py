"""Two processes partition a model for stage 3 of DeepSpeed, and run it without an engine."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import run_in_processes
from needs import needs_deepspeed
from tiny import LLAMA, tiny_policy

from lit_grpo.distributed import deepspeed_loading
from lit_grpo.distributed.deepspeed import ZeROStrategy, leave_out_shared_memory
from lit_grpo.policy.files.shard_loading import copy_shards, copy_without_weights
from lit_grpo.policy.named_weights import gather
from lit_grpo.policy.sharding import is_partitioned

IDS = torch.arange(6)[None]
TIED = LLAMA | {"tie_word_embeddings": True}


def run_ranks(function, tmp_path: Path) -> list:
    """Run a function of the rank on two connected ranks."""

    def connected(rank: int):
        torch.set_num_threads(1)
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path / 'store'}", rank=rank, world_size=2
        )
        from deepspeed.comm import init_distributed

        leave_out_shared_memory()
        init_distributed("gloo", verbose=False)
        try:
            return function(rank)
        finally:
            torch.distributed.destroy_process_group()

    return run_in_processes(*(partial(connected, rank) for rank in (0, 1)))


def run_in_turn(rank: int):
    """Return what a rank finds of a model that is partitioned, and of a copy of it."""
    model = tiny_policy(architecture=TIED, seed=7).model
    expected = model(IDS).logits
    copied = copy_without_weights(model)
    if rank == 1:
        for weight in model.parameters():
            weight.data.zero_()
    largest = []

    def run(one) -> torch.Tensor:
        def count(*_):
            largest.append(sum(weight.numel() for weight in one.parameters()))

        hooks = [layer.register_forward_hook(count) for layer in one.model.layers]
        with torch.no_grad(), deepspeed_loading.gathered_in_turn(one):
            logits = one.forward(IDS).logits
        for hook in hooks:
            hook.remove()
        return logits

    total = sum(weight.numel() for weight in model.parameters())
    config, linear = ZeROStrategy(3).config, torch.nn.functional.linear
    deepspeed_loading.partition(model, config)
    deepspeed_loading.partition(copied, config)
    copy_shards(model, copied, "cpu")
    differences = [float((run(one) - expected).abs().max()) for one in (model, copied)]

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        run(model)
    hook.remove()
    return {
        "differences": differences,
        "largest": max(largest) / total,
        "are partitioned": [is_partitioned(weight) for weight in model.parameters()],
        "keeps no weights": torch.nn.functional.linear is not linear,
        "left whole": [weight.numel() for weight in model.parameters()],
        "are tied": [
            one.lm_head.weight is one.model.embed_tokens.weight for one in (model, copied)
        ],
        "shares memory": any(
            one.ds_tensor.data_ptr() == other.ds_tensor.data_ptr()
            for one, other in zip(model.parameters(), copied.parameters(), strict=True)
        ),
        "shapes": [gather(weight).shape for weight in copied.parameters()],
    }


@pytest.mark.slow  # each process imports DeepSpeed
@needs_deepspeed
def test_a_partitioned_model_runs_without_an_engine_layer_after_layer(tmp_path):
    """The weights are those of the first rank; the copy has its own."""
    shapes = [weight.shape for weight in tiny_policy(architecture=TIED).model.parameters()]
    for found in run_ranks(run_in_turn, tmp_path):
        assert max(found["differences"]) < 1e-6
        assert found["largest"] < 0.9  # one of the two layers is whole, not both
        assert all(found["are partitioned"])
        assert not any(found["left whole"])
        assert found["keeps no weights"]  # for the backward pass of a linear layer
        assert found["are tied"] == [True, True]
        assert not found["shares memory"]
        assert found["shapes"] == shapes


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 3, "offload_param": {"device": "cpu"}}, True),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, False),
        ({"stage": 3, "offload_param": None}, True),
        ({"stage": 3, "zero_hpz_partition_size": 8}, False),
    ],
)
def test_what_is_swapped_or_kept_twice_is_left_to_the_engine(zero, expected):
    assert deepspeed_loading.keeps_partitions(zero) == expected


def test_a_whole_model_has_no_hooks_that_gather():
    model = tiny_policy().model
    with deepspeed_loading.gathered_in_turn(model):
        assert not any(layer._forward_pre_hooks for layer in model.model.layers)


def test_buffers_move_alone():
    model = torch.nn.BatchNorm1d(2)
    deepspeed_loading.move_buffers(model, torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.buffers())
    assert not any(weight.is_meta for weight in model.parameters())
