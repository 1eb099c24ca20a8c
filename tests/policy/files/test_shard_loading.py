"""A sharded policy is read from its files, and streamed, without ever being whole on a rank."""

import ctypes
import gc
import json
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import run_in_processes
from live_bytes import LiveBytes
from needs import needs_deepspeed
from tiny import LLAMA, tiny_policy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from lit_grpo.distributed.deepspeed import ZeROStrategy, leave_out_shared_memory
from lit_grpo.distributed.deepspeed_engine import ZeROSharding
from lit_grpo.distributed.fsdp2 import FSDP2Sharding
from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy import policy as policy_module
from lit_grpo.policy.files.model_files import save_model
from lit_grpo.policy.files.shard_loading import (
    copy_without_weights,
    model_of_placeholders,
    weights_to_read_in_parts,
)
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.policy.sharding import Sharding

OPTIONS = {"dtype": "float32", "attn_implementation": None, "trust_remote_code": False}
M_MMAP_THRESHOLD = -3
LARGE = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24}
EXPERTS = LARGE | {
    "model_type": "mixtral",
    "intermediate_size": 256,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
"""Files have the experts one by one, and two ranks unlike shares of them."""


def saved(directory: Path, architecture: dict[str, object] = LLAMA, **settings) -> Path:
    policy = tiny_policy(architecture=architecture, seed=7, **settings)
    policy.save_pretrained(directory)
    return directory


def load_and_measure(make_sharding: Callable[[], Sharding], path: Path, store: Path, rank: int):
    """Return what a rank of two has: its peak memory while it loads and streams, and the weights.

    All come twice, of a policy alone and of one with a reference.
    """
    connect(store, rank)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # large tensors are freed at once
    sharding, found = make_sharding(), []
    for with_reference in (False, True):
        policy, before = Policy(str(path)), anonymous_bytes()
        with highest(anonymous_bytes) as measured:
            policy.load(with_reference=with_reference, sharding=sharding)
        models = [policy.model, *([policy.reference_model] if with_reference else [])]
        loaded = anonymous_bytes()
        with highest(anonymous_bytes) as streaming:
            sums = [
                {name: float(weight.sum()) for name, weight in named_weights(model)}
                for model in models
            ]
        found.append((max(measured) - before, max(streaming) - loaded, sums))
        del policy, models
        gc.collect()
    torch.distributed.destroy_process_group()
    return found


def connect(store: Path, rank: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )


def zero_3() -> ZeROSharding:
    """Return the sharding of stage 3 of DeepSpeed before there is an engine."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(torch.distributed.get_rank())}
    from deepspeed.comm import init_distributed

    leave_out_shared_memory()
    init_distributed("gloo", verbose=False)
    strategy: Any = SimpleNamespace(stage=3, engine=None, is_training=True)
    strategy.config = ZeROStrategy(3).config
    return ZeROSharding(strategy=strategy)


def sharding_of_two() -> FSDP2Sharding:
    return FSDP2Sharding(
        mesh=init_device_mesh("cpu", (2,)),
        mixed_precision=MixedPrecisionPolicy(),
        offload=OffloadPolicy(),
        reshard_after_forward=True,
    )


def peaks_of_whole_models(store: Path, rank: int) -> list[float]:
    """Return the peak as a policy is built and sharded without files, in bytes of its weights.

    It comes twice, without and with a reference.
    """
    connect(store, rank)
    peaks = []
    for with_reference in (False, True):
        policy = Policy(architecture=LARGE | {"num_hidden_layers": 8}, packing=False)
        with LiveBytes(local_tensor) as live:
            # Before the first forward pass, whose gathered layers FSDP frees without an operation.
            policy_module.check_body_and_head = lambda *_, live=live: peaks.append(live.peak)
            policy.load(with_reference=with_reference, sharding=sharding_of_two())
    reference = policy.reference_model
    assert reference is not None
    for one, other in zip(reference.parameters(), policy.model.parameters(), strict=True):
        mine, theirs = one.to_local(), other.to_local()
        assert mine.equal(theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    torch.distributed.destroy_process_group()
    size = sum(one.numel() * one.element_size() for one in policy.model.parameters())
    return [peak / size for peak in peaks]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what a rank has of a tensor in memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return None if local.is_meta else local


def anonymous_bytes() -> int:
    """Return the memory of this process without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [one for one in lines if one.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@contextmanager
def highest(measure):
    """Measure every few milliseconds within the context; yield the list of values."""
    values, is_done = [], threading.Event()

    def run():
        while not is_done.wait(0.002):
            values.append(measure())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield values
    finally:
        is_done.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_sharding", "architecture"),
    [
        pytest.param(sharding_of_two, LARGE, id="fsdp2"),
        pytest.param(sharding_of_two, EXPERTS, id="fsdp2 experts"),
        pytest.param(zero_3, EXPERTS, id="zero3 experts", marks=needs_deepspeed),
    ],
)
def test_no_rank_has_the_whole_model_in_memory_as_it_is_read_and_streamed(
    tmp_path, make_sharding, architecture
):
    """Files in bfloat16, as most are: a model that is loaded from them whole is not their pages."""
    path = saved(tmp_path / "model", dtype="bfloat16", architecture=architecture)
    whole = tiny_policy(path=str(path), architecture=None)
    size = sum(one.nbytes for one in whole.model.parameters())
    expected = {name: float(weight.sum()) for name, weight in named_weights(whole.model)}
    measure = partial(load_and_measure, make_sharding, path, tmp_path / "store")
    ranks = [partial(measure, rank) for rank in (0, 1)]
    for (alone, streaming, sums), (both, _, sums_of_both) in run_in_processes(*ranks):
        assert alone < 0.85 * size  # its half, and some layers; the whole model would be 1.03
        assert both < 1.35 * size  # whole models one after the other would be 1.5
        assert streaming < 0.1 * size  # a tensor after the other; the other half would be 0.5
        assert sums == [expected]
        assert sums_of_both == [expected] * 2


@pytest.mark.slow
def test_no_rank_has_a_model_without_files_twice_for_its_reference(tmp_path):
    """As that of an adapter that is merged, or of experts that are named otherwise in files."""
    ranks = [partial(peaks_of_whole_models, tmp_path / "store", rank) for rank in (0, 1)]
    for alone, both in run_in_processes(*ranks):
        assert 1 <= alone < 1.2  # whole, and the shards of a layer after the other
        assert both < 1.2  # a copy of the whole model would be 2


def test_placeholders_have_shapes_buffers_and_ties_but_no_memory(tmp_path):
    path = saved(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True})
    whole = tiny_policy(path=str(path), architecture=None).model
    model = model_of_placeholders(str(path), **OPTIONS)
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())
    copied = copy_without_weights(model)
    assert all(p.is_meta for p in copied.parameters())
    for one in (model, copied):
        assert {n: p.shape for n, p in one.named_parameters()} == {
            n: p.shape for n, p in whole.named_parameters()
        }
        assert one.lm_head.weight is one.model.embed_tokens.weight
        for buffer, expected in zip(one.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected, rtol=0, atol=0)
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.parametrize(
    "why", ["no files", "an adapter", "other names", "other shapes", "layers in full"]
)
def test_otherwise_each_rank_loads_the_whole_model(tmp_path, why):
    path, lora = saved(tmp_path / "model"), None
    assert weights_to_read_in_parts(str(path), lora, **OPTIONS).directory == path
    if why == "no files":
        (path / "model.safetensors").unlink()
    elif why == "an adapter":
        (path / "adapter_config.json").write_text("{}")
    elif why.startswith("other"):
        config = path / "config.json"
        settings = json.loads(config.read_text())
        settings["num_hidden_layers" if why == "other names" else "intermediate_size"] += 1
        config.write_text(json.dumps(settings))
    else:
        lora = LoRA(modules_to_save=["lm_head"])
    assert weights_to_read_in_parts(str(path), lora, **OPTIONS) is None


def test_names_of_several_files_count_together(tmp_path):
    policy = tiny_policy()
    save_model(policy.model, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert weights_to_read_in_parts(str(tmp_path), None, **OPTIONS).directory == tmp_path


class PartsOnOneRank(Sharding):
    loads_parts = True


def test_a_model_that_is_not_read_in_parts_is_warned_of_with_its_size(tmp_path, caplog):
    policy = Policy(str(saved(tmp_path)), lora=LoRA(rank=2, modules_to_save=["lm_head"]))
    policy.load(with_reference=False, sharding=PartsOnOneRank())
    size = sum(one.nbytes for one in tiny_policy().model.parameters()) / 2**30
    assert f"the whole policy in host memory ({size:.3g} GiB each)" in caplog.text
