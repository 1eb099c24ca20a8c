"""Start a training run on two machines, hold its ranks where a stage begins, and let them go."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import Popen

import psutil
import sglang_server
from forked_ranks import Forked, Importer
from nodes import Node, torchrun
from served_engines import PROGRAM, QUICK
from sglang_server import OFFLINE
from worker_processes import wait_until

NUM_STEPS = 5
HELD_STEP = 2
START_SECONDS = 240
STOP_SECONDS = 90
"""Far below the timeout of the process group, but where that is what a test is about."""
SERVER_PORT = 31000

Agents = list[Forked]
DDP = {"class_path": "DDPStrategy", "init_args": {"timeout": "0:05:00"}}
FSDP2 = {
    "class_path": "lit_grpo.distributed.fsdp2.FSDP2Strategy",
    "init_args": {"timeout_minutes": 5},
}


def config(
    model: Path, engine: dict | None = None, stage: str = "generation", strategy: dict = DDP
) -> dict:
    """Return a config whose ranks are held where a stage begins."""
    callbacks = [
        {"class_path": "holds.HoldAtStage", "init_args": {"stage": stage, "step": HELD_STEP}},
        {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1}},
    ]
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
def servers(nodes: tuple[Node, Node], model: Path, directory: Path) -> Iterator[list[Popen[str]]]:
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
def training(
    importer: Importer,
    nodes: tuple[Node, Node],
    directory: Path,
    *,
    apart: str = "",
    ranks: str = "forked",
) -> Iterator[Agents]:
    """Start a torchrun on each machine.

    Args:
        apart: A directory of which the second machine has one of its own, empty at the start.
        ranks: ``started`` for interpreters, as torchrun itself does it.
    """
    lit_grpo = ["-m", "lit_grpo", "fit", "--config", "run.json", "--run_dir", "run"]
    agents = []
    try:
        for node in nodes:
            hidden = apart if node.rank == 1 else ""
            words = [ranks, node.name, hidden, *torchrun(node, nodes[0]), *lit_grpo]
            agents.append(
                importer.start(
                    [*words, "--ckpt_path", "auto"],
                    directory,
                    directory / f"said{node.rank}.txt",
                    program="forked_torchrun",
                    **node.variables,
                )
            )
        yield agents
    finally:
        for agent in agents:
            agent.kill_group()


def finish(importer: Importer, nodes: tuple[Node, Node], directory: Path, **settings: str) -> None:
    """Run both machines to the end of the training."""
    (directory / "go").touch()
    with training(importer, nodes, directory, **settings) as agents:
        codes = [agent.wait(START_SECONDS) for agent in agents]
    assert codes == [0, 0], said(directory, 0) + said(directory, 1)


@contextmanager
def held(importer: Importer, nodes: tuple[Node, Node], directory: Path) -> Iterator[Agents]:
    """Start both machines; yield once both ranks are held, and let them go afterwards."""
    with training(importer, nodes, directory) as agents:
        files = [directory / f"held{node.rank}" for node in nodes]

        def are_held() -> bool:
            has_ended = any(agent.poll() is not None for agent in agents)
            return has_ended or all(file.exists() for file in files)

        wait_until(are_held, START_SECONDS)
        assert all(agent.poll() is None for agent in agents), said(directory, 0)
        yield agents
        (directory / "signalled").touch()
        for agent in agents:
            agent.wait(STOP_SECONDS)
        wait_until(lambda: not any(left(node) for node in nodes), STOP_SECONDS)


def said(directory: Path, rank: int) -> str:
    return (directory / f"said{rank}.txt").read_text()


def left(node: Node) -> list[int]:
    """Return the processes of a run on a machine, without servers that the test started."""
    return [pid for pid in node.pids() if "forked_ranks" in words_of(pid)]


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def rank_of(agent: Forked) -> int:
    """Return the process id of the rank that a torchrun has started."""
    (rank,) = psutil.Process(agent.pid).children()
    return rank.pid
