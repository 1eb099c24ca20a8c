"""The guard removes what a server creates while it ends, and ends it when its owner dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server import guard as server_guard
from lit_grpo.rollout.server import process as server_process
from lit_grpo.rollout.server.process import ServerProcess

LATE_MEMORY = """
import signal, sys
from multiprocessing import resource_tracker, shared_memory

def make(*_):
    global memory
    memory = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # or Python would remove it

signal.signal(signal.SIGTERM, make)
open(sys.argv[2], "w").close()
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def grace_period(monkeypatch):
    monkeypatch.setattr(server_process, "GRACE_SECONDS", 0.5)


def test_memory_that_a_server_creates_after_sigterm_is_removed(tmp_path):
    name, ready = f"lit-grpo-test-{uuid4().hex}", tmp_path / "ready"
    command = [sys.executable, "-c", LATE_MEMORY, name, str(ready)]
    server = ServerProcess(command, {}, tmp_path / "log")
    wait_until(ready.exists)
    server.stop()
    assert not is_alive(server.pid)
    assert not Path("/dev/shm", name).exists()


def test_a_signal_that_asks_the_run_to_leave_ends_neither_guard_nor_server(tmp_path):
    ready = tmp_path / "ready"
    code = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(300)"
    server = ServerProcess([sys.executable, "-c", code, str(ready)], {}, tmp_path / "log")
    try:
        wait_until(ready.exists)
        guard = psutil.Process(server.pid).parent()
        for pid in (guard.pid, server.pid):
            os.kill(pid, signal.SIGUSR1)
    finally:
        server.stop()
    # The guard's exit code is that of the server, which SIGUSR1 would have ended first.
    assert server._guard.returncode == 256 - signal.SIGTERM
    assert not is_alive(server.pid)


SEMAPHORE = """
import multiprocessing, signal, sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Lock()
with open(sys.argv[1], "w") as file:
    file.write(lock._semlock.name)
while True:
    signal.pause()
"""


def test_a_semaphore_of_a_server_that_has_to_be_killed_is_removed(tmp_path):
    written = tmp_path / "name"
    server = ServerProcess([sys.executable, "-c", SEMAPHORE, str(written)], {}, tmp_path / "log")
    wait_until(lambda: written.exists() and written.read_text())
    semaphore = Path("/dev/shm", f"sem.{written.read_text().lstrip('/')}")
    assert semaphore.exists()
    server.stop()
    assert not is_alive(server.pid)
    assert not semaphore.exists()


OWNER = """
import subprocess, sys, time
guard = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_owner(tmp_path, number):
    """Its worker's shared memory and its scratch directory are removed, too."""
    name, ready, scratch = f"lit-grpo-test-{uuid4().hex}", tmp_path / "ready", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", LATE_MEMORY, name, str(ready)]
    guard = [server_guard.__file__, "0.2", str(scratch), *command]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *guard], stdout=subprocess.PIPE)
    server = psutil.Process(int(owner.stdout.readline()))
    wait_until(ready.exists)
    server.send_signal(signal.SIGTERM)  # create the memory
    wait_until(Path("/dev/shm", name).exists)
    owner.send_signal(number)
    owner.communicate()
    wait_until(lambda: not is_alive(server.pid))
    wait_until(lambda: not (Path("/dev/shm", name).exists() or scratch.exists()))


def test_the_guard_imports_nothing_from_the_package():
    """It is started by its path for every server, and has to be quick."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-c", code, server_guard.__file__]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "lit_grpo"} & set(loaded)
    assert os.path.isabs(server_guard.__file__)
