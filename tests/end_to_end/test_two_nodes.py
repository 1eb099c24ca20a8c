"""Runs on two machines, one of which fails: the other leaves, and both go on bit-identically.

The machines are network namespaces, each with a torchrun that starts one rank.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
import sglang_server
import torch
from nodes import Node, needs_nodes, torchrun, two_nodes
from paths import SUPPORT
from safetensors.torch import load_file
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE
from tiny import tiny_policy
from worker_processes import wait_until

from lit_grpo.stopping import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_nodes]

NUM_STEPS = 5
HELD_STEP = 2
START_SECONDS = 240
LEAVE_SECONDS = 90
"""Far below the timeout of the process group, but where that is what a test is about."""
TIMEOUT_SECONDS = 15
SERVER_PORT = 31000

HIDE = ["sh", "-c", 'mount -t tmpfs none "$APART" && exec "$@"', "sh"]
"""Starts a command with an empty file system in the place of a directory."""

Agents = list[Popen[str]]


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
def undisturbed(tmp_path_factory, model) -> Path:
    with two_nodes() as nodes:
        directory = begin(tmp_path_factory.mktemp("whole"), config(model, launched(nodes)))
        finish(nodes, directory)
    weights = [load_file(one / "model.safetensors") for one in (model, directory / "run/final")]
    assert not torch.equal(*(one["lm_head.weight"] for one in weights))
    return directory


def config(model: Path, engine: dict | None = None, stage: str = "generation") -> dict:
    """Return a config whose ranks are held where a stage begins."""
    callbacks = [
        {"class_path": "holds.HoldAtStage", "init_args": {"stage": stage, "step": HELD_STEP}},
        {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1}},
    ]
    strategy = {"class_path": "DDPStrategy", "init_args": {"timeout": "0:05:00"}}
    return {
        "trainer": {
            "accelerator": "cpu",
            "num_nodes": 2,
            "strategy": strategy,
            "max_steps": NUM_STEPS,
            "check_val_every_n_epoch": None,
            "val_check_interval": 2,
            "enable_progress_bar": False,
            "callbacks": callbacks,
        },
        "model": {
            "policy": {"path": str(model)},
            "group_size": 4,
            "sampling": {"max_tokens": 6, "min_tokens": 6},
            "rewards": [{"class_path": "small_runs.ShareOfLowBytes"}],
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.003}},
            "evaluation": {"before_training": False},
            **({"engine": engine} if engine else {}),
        },
        "data": {
            "class_path": "AdditionData",
            "init_args": {
                "num_digits": 1,
                "validation_size": 8,
                "train_size": 40,
                "prompts_per_step": 4,
            },
        },
    }


def launched(nodes: tuple[Node, Node]) -> dict:
    """Return the settings of a server that rank 0 launches on its machine, for both."""
    launch = {"program": PROGRAM, "env": OFFLINE, "host": nodes[0].address}
    return served(launch=launch)


def attached(nodes: tuple[Node, Node]) -> dict:
    """Return the settings for a server on each machine, which the test starts."""
    return served(urls=[f"http://{node.address}:{SERVER_PORT}" for node in nodes])


def served(**settings) -> dict:
    init_args = {"supervision": QUICK, "directory": "engine", **settings}
    return {"class_path": "SGLangEngine", "init_args": init_args}


@contextmanager
def servers(nodes: tuple[Node, Node], model: Path, directory: Path) -> Iterator[Agents]:
    """Start a server on each machine."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                node.running(
                    [
                        *(sys.executable, sglang_server.__file__, "--model-path", str(model)),
                        *("--host", node.address, "--port", str(SERVER_PORT)),
                        *("--enable-deterministic-inference", "--incremental-streaming-output"),
                    ],
                    directory,
                    said=directory / f"server{node.rank}.txt",
                    **OFFLINE,
                )
            )
            for node in nodes
        ]


def begin(directory: Path, settings: dict) -> Path:
    (directory / "run.json").write_text(json.dumps(settings))
    return directory


@contextmanager
def training(nodes: tuple[Node, Node], directory: Path, *, apart: str = "") -> Iterator[Agents]:
    """Start a torchrun on each machine.

    Args:
        apart: A directory of which the second machine has one of its own, empty at the start.
    """
    words = ["-m", "lit_grpo", "fit", "--config", "run.json", "--run_dir", "run"]
    with ExitStack() as stack:
        agents = []
        for node in nodes:
            hide = HIDE if apart and node.rank == 1 else []
            command = [*hide, *torchrun(node, nodes[0]), *words, "--ckpt_path", "auto"]
            said = directory / f"said{node.rank}.txt"
            variables = {"PYTHONPATH": str(SUPPORT), "APART": apart}
            agents.append(
                stack.enter_context(node.running(command, directory, said=said, **variables))
            )
        yield agents


def finish(nodes: tuple[Node, Node], directory: Path) -> None:
    """Run both machines to the end of the training."""
    (directory / "go").touch()
    with training(nodes, directory) as agents:
        codes = [agent.wait(START_SECONDS) for agent in agents]
    assert codes == [0, 0], said(directory, 0) + said(directory, 1)


@contextmanager
def held(nodes: tuple[Node, Node], directory: Path) -> Iterator[Agents]:
    """Start both machines; yield once both ranks are held, and let them go afterwards."""
    with training(nodes, directory) as agents:
        files = [directory / f"held{node.rank}" for node in nodes]

        def are_held() -> bool:
            has_ended = any(agent.poll() is not None for agent in agents)
            return has_ended or all(file.exists() for file in files)

        wait_until(are_held, START_SECONDS)
        assert all(agent.poll() is None for agent in agents), said(directory, 0)
        yield agents
        (directory / "signalled").touch()
        for agent in agents:
            agent.wait(LEAVE_SECONDS)
        wait_until(lambda: not any(left(node) for node in nodes), LEAVE_SECONDS)


def said(directory: Path, rank: int) -> str:
    return (directory / f"said{rank}.txt").read_text()


def left(node: Node) -> list[int]:
    """Return the processes of a run on a machine, without servers that the test started."""
    return [pid for pid in node.pids() if "lit_grpo" in " ".join(words_of(pid))]


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def rank_on(node: Node) -> int:
    """Return the process id of the rank that a machine's torchrun has started."""
    found = [pid for pid in node.pids() if "lit_grpo" in words_of(pid)]
    (pid,) = [pid for pid in found if "torch.distributed.run" not in words_of(pid)]
    return pid


def saved_step(directory: Path) -> int:
    path = directory / "run" / "checkpoints" / "last.ckpt"
    step: int = torch.load(path, weights_only=False)["rollout_step"]
    return step


def assert_left_with_a_checkpoint(directory: Path) -> None:
    """Check that the step in which the ranks were held was left, or finished if it was quick."""
    (step,) = re.findall(r"Ended by SIGTERM after (\d) rollout steps\.", said(directory, 0))
    assert HELD_STEP <= int(step) == saved_step(directory) < NUM_STEPS


def assert_goes_on(nodes: tuple[Node, Node], directory: Path, undisturbed: Path) -> None:
    """Resume on both machines, and compare with a run that nothing disturbed."""
    assert not (directory / "run" / "final").exists()
    finish(nodes, directory)
    final = [load_file(run / "run/final/model.safetensors") for run in (directory, undisturbed)]
    torch.testing.assert_close(*final, rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["generation", "micro_batch"])
def test_a_machine_that_crashes_ends_the_other_which_names_it(
    rank, stage, tmp_path, nodes, model, undisturbed
):
    directory = begin(tmp_path, config(model, launched(nodes), stage))
    with held(nodes, directory) as agents:
        nodes[rank].crash()
    survivor = 1 - rank
    assert agents[survivor].returncode == 1  # torchrun's own, whatever its ranks exit with
    text = said(directory, survivor)
    assert f"exitcode  : {int(ExitCode.RANK_LOST)} " in text, text
    assert nodes[rank].address in text.split("error: another process")[1].splitlines()[0]
    assert saved_step(directory) == HELD_STEP
    assert_goes_on(nodes, directory, undisturbed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_leaves_with_a_checkpoint_when_its_torchrun_is_killed(
    rank, tmp_path, nodes, model, undisturbed
):
    directory = begin(tmp_path, config(model, launched(nodes)))
    with held(nodes, directory) as agents:
        agents[rank].kill()
    assert "SIGTERM: ending with a checkpoint" in said(directory, rank)
    assert f"The launcher of rank {rank} has died." in said(directory, 0)
    assert_left_with_a_checkpoint(directory)
    assert_goes_on(nodes, directory, undisturbed)


def test_a_signal_to_one_rank_leaves_both_machines_and_servers_that_were_attached(
    tmp_path, nodes, model, undisturbed
):
    directory = begin(tmp_path, config(model, attached(nodes)))
    with servers(nodes, model, directory) as running:
        with held(nodes, directory) as agents:
            os.kill(rank_on(nodes[1]), signal.SIGTERM)
        assert [agent.returncode for agent in agents] == [1, 0]
        text = said(directory, 0)
        assert f"exitcode  : {128 + signal.SIGTERM} " in text, text
        assert_left_with_a_checkpoint(directory)
        assert_goes_on(nodes, directory, undisturbed)
        assert all(server.poll() is None for server in running)
        logs = [(directory / f"server{node.rank}.txt").read_text() for node in nodes]
    assert all(logs)


def test_a_machine_that_is_unreachable_is_noticed_after_the_timeout_of_the_strategy(
    tmp_path, nodes, model
):
    settings = config(model)
    settings["trainer"]["strategy"]["init_args"]["timeout"] = f"0:00:{TIMEOUT_SECONDS}"
    directory = begin(tmp_path, settings)
    with held(nodes, directory):
        nodes[1].unplug()
    for rank in (0, 1):
        text = said(directory, rank)
        assert f"exitcode  : {int(ExitCode.RANK_LOST)} " in text, text
        assert f"Timed out waiting {TIMEOUT_SECONDS}000ms" in text
        assert "(the timeout of trainer.strategy)" in text


def test_machines_that_do_not_share_the_run_directory_train_but_do_not_resume(
    tmp_path, nodes, model
):
    directory = begin(tmp_path, config(model))
    (directory / "go").touch()
    (directory / "run").mkdir()
    with training(nodes, directory, apart="run") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [0, 0], said(directory, 0)
    assert (directory / "run/final").exists()
    assert not (directory / "run/run_rank1.log").exists()  # it was on the other machine
    longer = config(model)
    longer["trainer"]["max_steps"] = NUM_STEPS + 1
    begin(directory, longer)
    with training(nodes, directory, apart="run") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [1, 1]
    text = said(directory, 0)
    assert f"exitcode  : {int(ExitCode.WRONG_INPUT)} " in text, text
    assert "ckpt_path must be the same checkpoint on all ranks, got rank 0 on" in text
    assert "step_000005.ckpt of" in text
    assert ": none (ranks that do not go on" in text


def test_machines_that_do_not_share_the_directory_of_the_engine_are_refused(tmp_path, nodes, model):
    directory = begin(tmp_path, config(model, launched(nodes)))
    (directory / "engine").mkdir()
    with training(nodes, directory, apart="engine") as agents:
        assert [agent.wait(START_SECONDS) for agent in agents] == [1, 1]
    for rank in (0, 1):
        rule = "directory must be a directory that all machines see under the same path"
        assert f"{rule}, got {directory}/engine, which rank 0 writes" in said(directory, rank)
    assert not [pid for node in nodes for pid in node.pids()]
