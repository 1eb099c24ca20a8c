"""When the trainer is killed, its vLLM leaves no process, no port, no shared memory and no file."""

import os
import signal
import socket
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from engine_runs import command, num_steps, start
from forked_ranks import Importer
from vllm_environment import VLLM_PROGRAM, needs_vllm
from vllm_settings import ARCHITECTURE, ENV
from worker_processes import is_alive, wait_until

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

GONE_SECONDS = 60
STARTING_SECONDS = 500
REWARDED_TOKENS = {"start_tokens": 1, "end_tokens": 7}
"""No completion gets a zero, since a run of zeros would end."""
GRPO = {
    "model.policy.path": None,
    "model.policy.architecture": ARCHITECTURE,
    "model.rewards": [{"class_path": "LengthReward", "init_args": REWARDED_TOKENS}],
    "model.evaluation.before_training": False,
    "data.init_args.prompts_per_step": 8,
    "trainer.max_steps": 100_000,
    "trainer.val_check_interval": 100_000,
}


@pytest.fixture
def tmp_path():
    """A short path, since vLLM puts sockets there, whose paths have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="lg-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def training(engine, directory, importer: Importer):
    """Start a run that does not end by itself, with its temporary files in ``directory/tmp``.

    It is forked, unless it needs the interpreter of vLLM.
    """
    settings = dict(GRPO)
    if engine == "VLLMServerEngine":
        settings["model.engine.init_args.directory"] = None  # a temporary one must be removed, too
        settings["model.engine.init_args.launch.program"] = VLLM_PROGRAM
    (directory / "tmp").mkdir()
    words = command("fit", "quickstart", settings, engine=engine)
    variables = {"TMPDIR": str(directory / "tmp")}
    if engine == "VLLMEngine":
        trainer = start(words, directory, **variables)
    else:
        trainer = importer.start(words[3:], directory, directory / "said.txt", **ENV | variables)
    try:
        yield trainer
    finally:
        trainer.kill()
        trainer.wait()


class Traces:
    """What could outlive a process: the processes of its sessions, their ports and shared memory.

    A server that is being started creates more of them, so `look` is repeated until all are gone.
    """

    def __init__(self, trainer):
        children = psutil.Process(trainer.pid).children(recursive=True)
        self.sessions = {os.getsid(process.pid) for process in children} | {trainer.pid}
        self.processes, self.ports, self.memory = set(), set(), set()
        self.look()

    def look(self):
        living = {
            pid for pid in psutil.pids() if is_alive(pid) and session_of(pid) in self.sessions
        }
        self.processes |= living
        for pid in living:
            with suppress(OSError, psutil.Error):
                self.ports |= listening_ports(pid)
                self.memory |= shared_memory(pid)
        return living


def session_of(pid):
    with suppress(ProcessLookupError):
        return os.getsid(pid)


def listening_ports(pid):
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def shared_memory(pid):
    """Return the files in shared memory that a process has mapped or open.

    They are matched by inode, since a semaphore is mapped under a name that no longer exists.
    """
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    numbers = {line.split()[4] for line in maps if " /dev/shm/" in line}
    links = {path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()}
    files = Path("/dev/shm").rglob("*")
    return {path for path in files if path in links or str(path.stat().st_ino) in numbers}


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_nothing_is_left(traces, directory):
    wait_until(lambda: not traces.look(), GONE_SECONDS)
    wait_until(lambda: not list((directory / "tmp").glob("lit-grpo-*")), GONE_SECONDS)
    assert [path for path in traces.memory if path.exists()] == []
    assert not any(map(is_listening, traces.ports))


def kill(trainer):
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()


@pytest.mark.parametrize("engine", ["VLLMServerEngine", "VLLMEngine"])
def test_nothing_is_left_when_the_trainer_is_killed_in_training(engine, tmp_path, importer):
    with training(engine, tmp_path, importer) as trainer:
        wait_until(lambda: trainer.poll() is not None or num_steps(tmp_path) >= 1, STARTING_SECONDS)
        assert trainer.poll() is None, (tmp_path / "said.txt").read_text()[-5000:]
        traces = Traces(trainer)
        assert list((tmp_path / "tmp").glob("lit-grpo-*"))
        if engine == "VLLMServerEngine":
            assert len(traces.processes) >= 5
            assert traces.memory
            assert traces.ports
        kill(trainer)
    assert_nothing_is_left(traces, tmp_path)


def test_nothing_is_left_when_the_trainer_is_killed_while_its_server_starts(tmp_path, importer):
    with training("VLLMServerEngine", tmp_path, importer) as trainer:
        wait_until(lambda: "VLLM::EngineCore" in child_names(trainer), STARTING_SECONDS)
        traces = Traces(trainer)
        kill(trainer)
    assert_nothing_is_left(traces, tmp_path)


def child_names(trainer):
    """Return the names of its child processes; those that have ended meanwhile have none."""
    names = []
    for process in psutil.Process(trainer.pid).children(recursive=True):
        with suppress(psutil.Error):
            names += process.cmdline()[:1]
    return names
