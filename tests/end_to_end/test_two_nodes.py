"""Runs on two machines, one of which fails: the other leaves, and both go on bit-identically.

The machines are network namespaces, each with a torchrun that has one rank.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked_ranks import Importer
from node_runs import (
    DDP,
    FSDP2,
    HELD_STEP,
    NUM_STEPS,
    START_SECONDS,
    attached,
    begin,
    config,
    finish,
    held,
    launched,
    rank_of,
    said,
    servers,
    training,
)
from nodes import Node, needs_nodes, two_nodes
from safetensors.torch import load_file
from stopped_runs import saved_step
from tiny import tiny_policy

from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_nodes]

TIMEOUT_SECONDS = 15


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(importer, tmp_path_factory, model) -> Path:
    return run_undisturbed(
        importer, tmp_path_factory, model, lambda nodes: config(model, launched(nodes))
    )


@pytest.fixture(scope="module")
def undisturbed_shards(importer, tmp_path_factory, model) -> Path:
    return run_undisturbed(
        importer, tmp_path_factory, model, lambda _: config(model, strategy=FSDP2)
    )


def run_undisturbed(
    importer: Importer,
    tmp_path_factory,
    model: Path,
    settings: Callable[[tuple[Node, Node]], dict],
) -> Path:
    """Return a run of interpreters that torchrun starts; those of the other runs are forked."""
    with two_nodes() as nodes:
        directory = begin(tmp_path_factory.mktemp("whole"), settings(nodes))
        finish(importer, nodes, directory, ranks="started")
    weights = [load_file(one / "model.safetensors") for one in (model, directory / "run/final")]
    assert not torch.equal(*(one["lm_head.weight"] for one in weights))
    return directory


def assert_left_with_a_checkpoint(directory: Path) -> None:
    """Check that the step in which the ranks were held was left, or finished if it was quick."""
    (step,) = re.findall(r"Ended by SIGTERM after (\d) rollout steps\.", said(directory, 0))
    assert HELD_STEP <= int(step) == saved_step(directory) < NUM_STEPS


def assert_goes_on(
    importer: Importer, nodes: tuple[Node, Node], directory: Path, undisturbed: Path
) -> None:
    """Resume on both machines, and compare with a run that nothing disturbed."""
    assert not (directory / "run" / "final").exists()
    finish(importer, nodes, directory)
    final = [load_file(run / "run/final/model.safetensors") for run in (directory, undisturbed)]
    torch.testing.assert_close(*final, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rank", "stage"), [(0, "generation"), (1, "generation"), (0, "micro_batch")]
)
def test_a_machine_that_crashes_ends_the_other_which_names_it(
    rank, stage, tmp_path, importer, nodes, model, undisturbed
):
    assert_a_crash_ends_both(importer, nodes, rank, tmp_path, config(model, launched(nodes), stage))
    assert_goes_on(importer, nodes, tmp_path, undisturbed)


def test_a_machine_that_crashes_ends_the_other_while_they_share_a_policy(
    tmp_path, importer, nodes, model, undisturbed_shards
):
    settings = config(model, stage="micro_batch", strategy=FSDP2)
    assert_a_crash_ends_both(importer, nodes, 1, tmp_path, settings)
    assert (tmp_path / "run/checkpoints/last.ckpt").is_dir()
    assert_goes_on(importer, nodes, tmp_path, undisturbed_shards)


def assert_a_crash_ends_both(
    importer: Importer, nodes: tuple[Node, Node], rank: int, directory: Path, settings: dict
) -> None:
    """Let a machine crash where the ranks are held, and check how the other leaves."""
    begin(directory, settings)
    with held(importer, nodes, directory) as agents:
        nodes[rank].crash()
    survivor = 1 - rank
    assert agents[survivor].poll() == 1  # torchrun's own, whatever its ranks exit with
    text = said(directory, survivor)
    assert f"exitcode  : {int(ExitCode.RANK_LOST)} " in text, text
    assert nodes[rank].address in text.split("error: another process")[1].splitlines()[0]
    assert saved_step(directory) == HELD_STEP


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_leaves_with_a_checkpoint_when_its_torchrun_is_killed(
    rank, tmp_path, importer, nodes, model, undisturbed
):
    directory = begin(tmp_path, config(model, launched(nodes)))
    with held(importer, nodes, directory) as agents:
        os.kill(agents[rank].pid, signal.SIGKILL)
    assert "SIGTERM: ending with a checkpoint" in said(directory, rank)
    assert f"The launcher of rank {rank} has died." in said(directory, 0)
    assert_left_with_a_checkpoint(directory)
    assert_goes_on(importer, nodes, directory, undisturbed)


def test_a_signal_to_one_rank_leaves_both_machines_and_servers_that_were_attached(
    tmp_path, importer, nodes, model, undisturbed
):
    directory = begin(tmp_path, config(model, attached(nodes)))
    with servers(nodes, model, directory) as running:
        with held(importer, nodes, directory) as agents:
            os.kill(rank_of(agents[1]), signal.SIGTERM)
        assert [agent.poll() for agent in agents] == [1, 0]
        text = said(directory, 0)
        assert f"exitcode  : {128 + signal.SIGTERM} " in text, text
        assert_left_with_a_checkpoint(directory)
        assert_goes_on(importer, nodes, directory, undisturbed)
        assert all(server.poll() is None for server in running)
        logs = [(directory / f"server{node.rank}.txt").read_text() for node in nodes]
    assert all(logs)


def test_a_machine_that_is_unreachable_is_noticed_after_the_timeout_of_the_strategy(
    tmp_path, importer, nodes, model
):
    strategy = DDP | {"init_args": {"timeout": f"0:00:{TIMEOUT_SECONDS}"}}
    directory = begin(tmp_path, config(model, strategy=strategy))
    with held(importer, nodes, directory):
        nodes[1].unplug()
    for rank in (0, 1):
        text = said(directory, rank)
        assert f"exitcode  : {int(ExitCode.RANK_LOST)} " in text, text
        assert f"Timed out waiting {TIMEOUT_SECONDS}000ms" in text
        assert "(the timeout of trainer.strategy)" in text


def test_machines_that_do_not_share_the_run_directory_train_but_do_not_resume(
    tmp_path, importer, nodes, model
):
    directory = begin(tmp_path, config(model))
    (directory / "go").touch()
    (directory / "run").mkdir()
    with training(importer, nodes, directory, apart="run") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [0, 0], said(directory, 0)
    assert (directory / "run/final").exists()
    assert not (directory / "run/run_rank1.log").exists()  # it was on the other machine
    longer = config(model)
    longer["trainer"]["max_steps"] = NUM_STEPS + 1
    begin(directory, longer)
    with training(importer, nodes, directory, apart="run") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [1, 1]
    text = said(directory, 0)
    assert f"exitcode  : {int(ExitCode.WRONG_INPUT)} " in text, text
    assert "ckpt_path must be the same checkpoint on all ranks, got rank 0 on" in text
    assert "step_000005.ckpt of" in text
    assert ": none (ranks that do not go on" in text


def test_machines_that_do_not_share_the_directory_of_the_engine_are_refused(
    tmp_path, importer, nodes, model
):
    directory = begin(tmp_path, config(model, launched(nodes)))
    (directory / "engine").mkdir()
    with training(importer, nodes, directory, apart="engine") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [1, 1]
    for rank in (0, 1):
        rule = "directory must be a directory that all machines see under the same path"
        assert f"{rule}, got {directory}/engine, which rank 0 writes" in said(directory, rank)
    assert not [pid for node in nodes for pid in node.pids()]
