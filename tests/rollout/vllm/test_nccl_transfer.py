"""Weights sent to vLLM servers by vLLM's own transfer, with `vllm_without_nccl` in NCCL's place: a
real server, and `_transfer_checks` in a child that has vLLM, too."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import SUPPORT
from tiny import tiny_policy
from vllm_environment import ROOT, needs_vllm
from vllm_runs import assert_same_logprobs, run
from weight_policies import assert_same, shard, stirred

from lit_grpo.policy import LoRA
from lit_grpo.rollout import VLLMServerEngine
from lit_grpo.rollout.vllm.nccl_transfer import _meeting_place
from lit_grpo.rollout.weights.named import named_weights
from lit_grpo.rollout.weights.store import WeightStore

pytestmark = pytest.mark.timeout(600)  # a server starts twice, on a busy machine perhaps

SHARDED = ["llama", "tied llama with lora", "mixtral"]


# A server that is sent weights


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("transfer")
    path = directory / "checks.json"
    run(SUPPORT / "_transfer_checks.py", path, directory / "engine", cwd=ROOT)
    return json.loads(path.read_text())


def assert_sampled_with(check, version: int) -> None:
    """By the engine's own proof, and by the trainer's logprob of every token."""
    assert check["version"] == version
    assert {one for row in check["completions"] for one in row["policy_versions"]} == {version}
    (proof,) = check["proofs"]
    assert proof < 1e-4
    assert_same_logprobs(check["completions"], check["trainer_logprobs"])


@needs_vllm
@pytest.mark.slow
def test_full_weights_arrive_without_files(checks):
    assert_sampled_with(checks["first"], 0)
    assert checks["files"] == ["model", "server_0.log"]  # the former is what it was started with


@needs_vllm
@pytest.mark.slow
def test_further_weights_come_over_the_same_group(checks):
    assert checks["first"]["groups_opened"] == 1
    assert_sampled_with(checks["second"], 1)
    assert checks["second"]["groups_opened"] == 0


@needs_vllm
@pytest.mark.slow
def test_a_restarted_server_gets_what_was_sent_last_although_the_policy_has_moved(checks):
    assert checks["restarted"]["restarts"] == 1
    assert_sampled_with(checks["restarted"], 1)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "version"), [("sender_failed", 2), ("server_failed", 3), ("sender_hung", 4)]
)
def test_a_transfer_that_breaks_off_in_a_fused_layer_is_made_again(checks, trouble, version):
    assert_sampled_with(checks[trouble], version)
    assert checks[trouble]["groups_opened"] == 1
    assert checks[trouble]["restarts"] == 0


@needs_vllm
@pytest.mark.slow
def test_a_group_that_took_another_s_place_stays(checks):
    assert_sampled_with(checks["at_last"], 5)
    assert checks["at_last"]["groups_opened"] == 0


# What is kept for the servers


def outbox(directory: Path, *, is_keeper: bool = True, dtype=torch.float32) -> WeightStore:
    return WeightStore(
        directory, dtype=dtype, is_adapter=False, in_files=False, is_keeper=is_keeper
    )


def test_kept_weights_are_those_of_their_moment_in_the_servers_dtype(tmp_path):
    policy = tiny_policy()
    expected = {name: weight.bfloat16() for name, weight in named_weights(policy.model)}
    exact = {name: weight.clone() for name, weight in named_weights(policy.model)}
    kept = outbox(tmp_path, dtype=torch.bfloat16).put(policy, 3).weights
    kept_exactly = outbox(tmp_path).put(policy, 3).weights
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    assert_same(dict(kept.tensors), expected)
    assert_same(dict(kept_exactly.tensors), exact)
    assert kept.device == torch.device("cpu")
    assert not list(tmp_path.iterdir())


def keep_sharded(rank: int, directory: Path) -> None:
    """One of two processes that shard each policy; only the first keeps it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    box = outbox(directory, is_keeper=rank == 0)
    kept = [box.put(SimpleNamespace(model=shard(stirred(name).model)), 3) for name in SHARDED]
    torch.save(kept, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_the_first_of_two_ranks_that_share_a_policy_keeps_all_of_it(tmp_path):
    torch.multiprocessing.spawn(keep_sharded, (tmp_path,), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{n}.pt", weights_only=False) for n in (0, 1))
    assert first == second  # the same update, wherever the weights are
    for name, mine, other in zip(SHARDED, first, second, strict=True):
        assert other.weights is None
        assert_same(dict(mine.weights.tensors), dict(named_weights(stirred(name).model)))


# What cannot be


def test_a_transfer_without_full_weights_is_refused():
    policy = tiny_policy(lora=LoRA(rank=2))
    engine = VLLMServerEngine(weight_transfer="nccl")
    with pytest.raises(ValueError, match=r"adapter is sent alone .* or weight_sync to full"):
        engine.start(policy)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_trainer_without_vllm_is_told_what_to_install():
    for settings in ({}, {"weight_sync": "full", "lora": LoRA(rank=2)}):
        policy = tiny_policy(lora=settings.pop("lora", None))
        engine = VLLMServerEngine(weight_transfer="nccl", **settings)
        with pytest.raises(ValueError, match=r"pip install vllm\), or set .*weight_transfer"):
            engine.start(policy)


def test_group_and_server_meet_at_an_address_of_this_machine():
    address, port = _meeting_place("http://localhost:8000")
    assert address == "127.0.0.1"
    with socket.socket() as free:
        free.bind((address, port))
