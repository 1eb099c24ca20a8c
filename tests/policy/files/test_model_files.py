"""Files for inference servers have the policy's weights; a sharded one is gathered bit by bit."""

import errno
import json
import resource
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed
from peft import PeftModel
from safetensors.torch import load_file
from tiny import tiny_policy
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM
from weight_policies import (
    ADAPTED,
    POLICIES,
    assert_same,
    perturbed,
    read_weights,
    run_two_ranks,
    shard,
)

from lit_grpo.policy.files.model_files import save_adapter, save_weights
from lit_grpo.policy.named_weights import named_weights

IDS = torch.tensor([[1, 2, 3, 4]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", POLICIES)
def test_a_written_directory_loads_as_the_policy(name, tmp_path):
    policy = perturbed(name)
    save_weights(policy.model, tmp_path / "new", dtype=None, is_writer=True, shard_bytes=50_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert loaded.dtype == policy.model.dtype
    tolerance = (
        {"atol": 1e-4, "rtol": 1e-4}
        if loaded.dtype == torch.float32
        else {"atol": 0.05, "rtol": 0.05}
    )
    torch.testing.assert_close(logits(loaded), logits(policy.model), **tolerance)


def test_a_buffer_of_integers_is_written_and_not_cast(tmp_path):
    model = tiny_policy().model
    model.model.register_buffer("seen", torch.tensor([3]))
    save_weights(model, tmp_path / "new", dtype=torch.bfloat16, is_writer=True)
    weights = read_weights(tmp_path / "new")
    assert weights.pop("model.seen").tolist() == [3]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_files_are_cast_and_their_config_says_so(tmp_path):
    policy = tiny_policy()
    save_weights(policy.model, tmp_path / "new", dtype=torch.bfloat16, is_writer=True)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    expected = {name: w.bfloat16() for name, w in policy.model.state_dict().items()}
    assert_same(read_weights(tmp_path / "new"), expected)
    assert policy.model.config.dtype == policy.model.dtype == torch.float32


def test_one_file_needs_no_index(tmp_path):
    save_weights(tiny_policy().model, tmp_path / "new", dtype=None, is_writer=True)
    assert {file.name for file in (tmp_path / "new").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }


def test_no_file_is_larger_than_shard_bytes_unless_a_single_tensor_is(tmp_path):
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
    weights = read_weights(tmp_path / "new")
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    assert_same(weights, dict(policy.model.state_dict()))


def test_a_server_of_another_user_may_read_the_files(tmp_path):
    policy = perturbed("llama with lora")
    save_weights(policy.model, tmp_path / "new", dtype=None, is_writer=True)
    save_adapter(policy.model, tmp_path / "adapter", is_writer=True)
    (tmp_path / "usual").touch()
    (tmp_path / "usual directory").mkdir()
    for directory in (tmp_path / "new", tmp_path / "adapter"):
        assert directory.stat().st_mode == (tmp_path / "usual directory").stat().st_mode
        for file in directory.iterdir():
            assert file.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_new_directory_replaces_the_old_one_with_all_its_files(tmp_path):
    directory, policy = tmp_path / "new", perturbed("llama")
    save_weights(tiny_policy().model, directory, dtype=None, is_writer=True, shard_bytes=20_000)
    save_weights(policy.model, directory, dtype=None, is_writer=True)
    assert_same(read_weights(directory), dict(policy.model.state_dict()))
    assert list(tmp_path.iterdir()) == [directory]


def test_a_write_that_fails_is_the_error_of_the_system_with_the_file(tmp_path):
    """A limit on the size of files stands for a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    policy = tiny_policy()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            policy.save_pretrained(tmp_path / "final")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert raised.value.errno == errno.EFBIG
    assert str(raised.value.filename).startswith(str(tmp_path))


def test_an_interrupted_write_leaves_the_old_directory_and_nothing_else(tmp_path):
    directory, policy = tmp_path / "new", tiny_policy()
    save_weights(policy.model, directory, dtype=None, is_writer=True)
    old = read_weights(directory)
    broken = perturbed("llama").model
    broken.lm_head.weight = torch.nn.Parameter(broken.lm_head.weight.detach().to_sparse())
    # It comes last, and a sparse tensor cannot be written.
    with pytest.raises((ValueError, RuntimeError)):
        save_weights(broken, directory, dtype=None, is_writer=True, shard_bytes=20_000)
    assert_same(read_weights(directory), old)
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize("name", ADAPTED)
def test_a_written_adapter_is_that_of_peft_and_gives_the_policys_logits(name, tmp_path):
    policy = perturbed(name)
    save_adapter(policy.model, tmp_path / "new", is_writer=True)
    policy.model.save_pretrained(tmp_path / "expected", save_embedding_layers=False)
    assert_same(read_weights(tmp_path / "new"), read_weights(tmp_path / "expected"))
    loaded = PeftModel.from_pretrained(
        tiny_policy(**POLICIES[name] | {"lora": None}).model, tmp_path / "new"
    )
    torch.testing.assert_close(logits(loaded), logits(policy.model))


def test_an_adapter_with_layers_trained_in_full_is_refused(tmp_path):
    model = perturbed("a head trained in full").model
    with pytest.raises(ValueError, match=r"\['lm_head'\].*Set model.policy.lora.modules_to_save"):
        save_adapter(model, tmp_path / "new", is_writer=True)
    assert not list(tmp_path.iterdir())


SHARDED = ["llama", "tied llama", "gpt2", "mixtral", *ADAPTED, "lora on experts"]
SHARD_BYTES = 40_000


class Gathered:
    """Counts the tensors that are gathered, and the bytes of earlier ones that are still alive."""

    def __init__(self) -> None:
        self._gather = DTensor.full_tensor
        self._storages: list[tuple[StorageWeakRef, int]] = []
        self.start(allowed=0)

    def start(self, *, allowed: int) -> None:
        self.allowed, self.count, self.kept = allowed, 0, 0

    def full_tensor(self, tensor: DTensor) -> torch.Tensor:
        end = time.monotonic() + 60  # gloo's thread frees its reference a little later
        while self._alive() > max(self.allowed, self.kept) and time.monotonic() < end:
            time.sleep(0.001)
        self.kept = max(self.kept, self._alive())
        self.count += 1
        full = self._gather(tensor)
        storage = full.untyped_storage()
        self._storages.append((StorageWeakRef(storage), storage.nbytes()))
        return full

    def _alive(self) -> int:
        """Return the bytes of the tensors that are not freed."""
        self._storages = [pair for pair in self._storages if not pair[0].expired()]
        return sum(num_bytes for _, num_bytes in self._storages)


def run_rank(rank: int, directory: Path) -> None:
    """Shard each policy in one of two processes, write it, and note which bytes were alive."""
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
        model = shard(perturbed(name).model)
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
    model(IDS).logits.sum().backward()  # all ranks are in step, and training can continue
    torch.save(notes, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The directory in which two ranks wrote the policies, and the notes of each rank."""
    directory = tmp_path_factory.mktemp("sharded")
    run_two_ranks(run_rank, directory)
    return directory, [torch.load(directory / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_policy_is_written_as_the_whole_one_would_be(name, ranks):
    directory, _ = ranks
    assert_same(read_weights(directory / name), dict(named_weights(perturbed(name).model)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_a_sharded_adapter_is_written_as_the_whole_one_would_be(name, ranks, tmp_path):
    directory, _ = ranks
    save_adapter(perturbed(name).model, tmp_path / "whole", is_writer=True)
    assert_same(read_weights(directory / f"{name} adapter"), read_weights(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_one_gathered_tensor_is_alive_at_a_time_besides_the_writers_shard(name, ranks):
    for rank, notes in enumerate(ranks[1]):
        for use in ("iterated", "cast", "written"):
            count, kept = notes[name, use]
            assert count >= 20
            assert kept <= (SHARD_BYTES if (rank, use) == (0, "written") else 0)


@pytest.mark.slow
def test_a_failed_write_does_not_block_the_other_rank(ranks):
    _, (writer, other) = ranks
    assert writer["failed"]
    assert "failed" not in other
