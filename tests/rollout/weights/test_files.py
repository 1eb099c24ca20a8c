"""What an inference server is sent are the policy's weights, whole, and gathered one at a time."""

import copy
import json
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
from peft import PeftModel
from safetensors.torch import load_file
from tiny import LLAMA, tiny_policy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import GroupWeightRename
from weight_policies import ADAPTED, POLICIES, assert_same, shard, stirred

from lit_grpo.policy import LoRA, Policy
from lit_grpo.rollout.weights.files import save_adapter, save_weights
from lit_grpo.rollout.weights.named import named_weights

IDS = torch.tensor([[1, 2, 3, 4]])


def read(directory: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def saved(policy: Policy, directory: Path) -> dict[str, torch.Tensor]:
    """What the policy itself writes, by transformers' and peft's own ways."""
    policy.save_pretrained(directory)
    return read(directory)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", POLICIES)
def test_names_and_weights_are_those_of_the_written_policy(name, tmp_path):
    policy = stirred(name)
    before = copy.deepcopy(policy.state_dict())
    weights = dict(named_weights(policy.model))
    assert_same(dict(policy.state_dict()), dict(before))
    assert_same(weights, saved(policy, tmp_path))


@pytest.mark.parametrize("name", POLICIES)
def test_a_written_directory_loads_as_the_policy(name, tmp_path):
    policy = stirred(name)
    save_weights(policy.model, tmp_path / "new", dtype=None, is_writer=True, shard_bytes=50_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert loaded.dtype == policy.model.dtype
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-4}
        if loaded.dtype == torch.float32
        else {"atol": 0.05, "rtol": 0.05}
    )
    torch.testing.assert_close(logits(loaded), logits(policy.model), **tolerance)


def test_a_merged_weight_is_the_base_plus_the_scaled_product_of_the_factors():
    model = stirred("llama with lora").model
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(
        dict(named_weights(model))["model.layers.1.mlp.up_proj.weight"],
        (layer.base_layer.weight + 32 / 3 * product).detach(),
    )


def test_a_merged_weight_of_gpt2_takes_the_product_transposed():
    model = stirred("gpt2 with lora").model
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(
        dict(named_weights(model))["transformer.h.0.attn.c_attn.weight"],
        (layer.base_layer.weight + 32 / 3 * product.T).detach(),
    )


def test_weights_that_a_checkpoint_holds_fused_are_gathered_together_and_fused(tmp_path):
    settings = LLAMA | {"model_type": "hrm_text", "vocab_size": 64, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(tmp_path)
    written = read(tmp_path)
    assert any("gqkv_proj" in name for name in written)
    assert_same(dict(named_weights(model)), written)


def test_names_that_need_the_whole_model_are_refused_with_what_to_use_instead():
    model = tiny_policy().model
    # On disk each name is the next one's in memory, which shows only where the first is seen.
    model._weight_conversions = [
        GroupWeightRename(["mlp.a_proj", "mlp.down_proj"], ["mlp.down_proj", "mlp.gate_proj"])
    ]
    with pytest.raises(ValueError, match=r"layers.0.mlp.*Set model.engine to HFEngine"):
        next(named_weights(model))


def test_a_loaded_mixture_of_experts_is_named_as_on_its_disk(tmp_path):
    stirred("mixtral").save_pretrained(tmp_path)
    policy = tiny_policy(architecture=None, path=str(tmp_path), lora=LoRA(rank=3))
    assert_same(dict(named_weights(policy.model)), read(tmp_path))


def test_a_buffer_of_integers_is_sent_and_not_cast(tmp_path):
    model = tiny_policy().model
    model.model.register_buffer("seen", torch.tensor([3]))
    save_weights(model, tmp_path / "new", dtype=torch.bfloat16, is_writer=True)
    weights = read(tmp_path / "new")
    assert weights.pop("model.seen").tolist() == [3]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_files_are_cast_and_their_config_says_so(tmp_path):
    policy = tiny_policy()
    save_weights(policy.model, tmp_path / "new", dtype=torch.bfloat16, is_writer=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    expected = {name: w.bfloat16() for name, w in policy.model.state_dict().items()}
    assert_same(read(tmp_path / "new"), expected)
    assert policy.model.config.dtype == policy.model.dtype == torch.float32


def test_one_file_needs_no_index(tmp_path):
    save_weights(tiny_policy().model, tmp_path / "new", dtype=None, is_writer=True)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }


def test_no_file_is_larger_than_asked_for_unless_a_single_tensor_is(tmp_path):
    policy = tiny_policy()
    save_weights(policy.model, tmp_path / "new", dtype=None, is_writer=True, shard_bytes=20_000)
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    contents = [load_file(file) for file in files]
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for content in contents:
        assert sum(w.nbytes for w in content.values()) <= 20_000 or len(content) == 1
    assert [{"model.embed_tokens.weight"}, {"lm_head.weight"}] == [
        set(content) for content in contents if max(w.nbytes for w in content.values()) > 20_000
    ]
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: file.name for file, content in zip(files, contents, strict=True) for name in content
    }
    weights = read(tmp_path / "new")
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert_same(weights, dict(policy.model.state_dict()))


def test_a_server_of_another_user_may_read_the_files(tmp_path):
    policy = stirred("llama with lora")
    save_weights(policy.model, tmp_path / "new", dtype=None, is_writer=True)
    save_adapter(policy.model, tmp_path / "adapter", is_writer=True)
    (tmp_path / "usual").touch()
    (tmp_path / "usual directory").mkdir()
    for directory in (tmp_path / "new", tmp_path / "adapter"):
        assert directory.stat().st_mode == (tmp_path / "usual directory").stat().st_mode
        for file in directory.iterdir():
            assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_new_directory_takes_the_place_of_the_old_one_with_all_its_files(tmp_path):
    directory, policy = tmp_path / "new", stirred("llama")
    save_weights(tiny_policy().model, directory, dtype=None, is_writer=True, shard_bytes=20_000)
    save_weights(policy.model, directory, dtype=None, is_writer=True)
    assert_same(read(directory), dict(policy.model.state_dict()))
    assert list(tmp_path.iterdir()) == [directory]


def test_an_interrupted_write_leaves_the_old_directory_and_nothing_beside_it(tmp_path):
    directory, policy = tmp_path / "new", tiny_policy()
    save_weights(policy.model, directory, dtype=None, is_writer=True)
    old = read(directory)
    broken = stirred("llama").model
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.detach().to_sparse())
    with pytest.raises((ValueError, RuntimeError)):  # no file can hold it; it comes last
        save_weights(broken, directory, dtype=None, is_writer=True, shard_bytes=20_000)
    assert_same(read(directory), old)
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize("name", ADAPTED)
def test_a_written_adapter_is_peft_s_and_gives_the_policy_s_logits(name, tmp_path):
    policy = stirred(name)
    save_adapter(policy.model, tmp_path / "new", is_writer=True)
    policy.model.save_pretrained(tmp_path / "expected", save_embedding_layers=False)
    assert_same(read(tmp_path / "new"), read(tmp_path / "expected"))
    loaded = PeftModel.from_pretrained(
        tiny_policy(**POLICIES[name] | {"lora": None}).model, tmp_path / "new"
    )
    torch.testing.assert_close(logits(loaded), logits(policy.model))


def test_an_adapter_with_layers_trained_in_full_is_refused(tmp_path):
    model = stirred("a head trained in full").model
    with pytest.raises(ValueError, match=r"\['lm_head'\].*Set model.policy.lora.modules_to_save"):
        save_adapter(model, tmp_path / "new", is_writer=True)
    assert not list(tmp_path.iterdir())


SHARDED = ["llama", "tied llama", "gpt2", "mixtral", *ADAPTED, "lora on experts"]
SHARD_BYTES = 40_000


class Gathered:
    """Counts what is gathered, and what was gathered before and is still alive."""

    def __init__(self) -> None:
        self._gather = DTensor.full_tensor
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self.start(allowed=0)

    def start(self, *, allowed: int) -> None:
        self.allowed, self.count, self.kept = allowed, 0, 0

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        end = time.monotonic() + 2  # gloo's own thread lets go a little later
        while self._alive() > max(self.allowed, self.kept) and time.monotonic() < end:
            time.sleep(0.001)
        self.kept = max(self.kept, self._alive())
        self.count += 1
        full = self._gather(tensor)
        storage = full.untyped_storage()
        self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        return full

    def _alive(self) -> int:
        """Bytes of the tensors that are not freed."""
        self._storages = [pair for pair in self._storages if not pair[0].expired()]
        return sum(num_bytes for _, num_bytes in self._storages)


def run_rank(rank: int, directory: Path) -> None:
    """One of two processes that shard each policy, write it and note what was alive."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=100),
    )
    gathered = Gathered()
    DTensor.full_tensor = lambda tensor: gathered.full_tensor(tensor)
    notes = {}
    for name in SHARDED:
        model = shard(stirred(name).model)
        writing = {"is_writer": rank == 0, "shard_bytes": SHARD_BYTES}
        gathered.start(allowed=0)
        deque(named_weights(model), maxlen=0)
        notes[name, "iterated"] = gathered.count, gathered.kept
        gathered.start(allowed=0)
        save_weights(model, directory / f"{name} cast", dtype=torch.float16, **writing)
        notes[name, "cast"] = gathered.count, gathered.kept
        gathered.start(allowed=SHARD_BYTES if rank == 0 else 0)
        save_weights(model, directory / name, dtype=None, **writing)
        notes[name, "written"] = gathered.count, gathered.kept
        if name in ADAPTED:
            save_adapter(model, directory / f"{name} adapter", is_writer=rank == 0)
    if rank == 0:
        (directory / "file").touch()
    try:
        save_weights(model, directory / "file" / "new", dtype=None, **writing)
    except (FileExistsError, NotADirectoryError):
        notes["failed"] = True
    model(IDS).logits.sum().backward()  # no rank is behind, and the policy can go on
    torch.save(notes, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Where two ranks wrote the policies, and the notes of each."""
    directory = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.spawn(run_rank, (directory,), nprocs=2)
    return directory, [torch.load(directory / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_policy_is_written_as_the_whole_one_would_be(name, ranks):
    directory, _ = ranks
    assert_same(read(directory / name), dict(named_weights(stirred(name).model)))


@pytest.mark.parametrize("name", ADAPTED)
def test_a_sharded_adapter_is_written_as_the_whole_one_would_be(name, ranks, tmp_path):
    directory, _ = ranks
    save_adapter(stirred(name).model, tmp_path / "whole", is_writer=True)
    assert_same(read(directory / f"{name} adapter"), read(tmp_path / "whole"))


@pytest.mark.parametrize("name", SHARDED)
def test_one_gathered_tensor_is_alive_at_a_time_beside_the_writer_s_shard(name, ranks):
    for rank, notes in enumerate(ranks[1]):
        for doing in ("iterated", "cast", "written"):
            count, kept = notes[name, doing]
            assert count >= 20
            assert kept <= (SHARD_BYTES if (rank, doing) == (0, "written") else 0)


def test_a_writer_that_fails_leaves_no_other_rank_waiting(ranks):
    _, (writer, other) = ranks
    assert writer["failed"]
    assert "failed" not in other
