"""What a trainer starts and writes goes with it: the races of starting and ending."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server import process as server_process
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.server.scratch import ScratchDirectory

LATE_MEMORY = """
import signal, sys
from multiprocessing import resource_tracker, shared_memory

def make(*_):
    global memory
    memory = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # nobody else takes it away

signal.signal(signal.SIGTERM, make)
open(sys.argv[2], "w").close()
while True:
    signal.pause()
"""


def test_memory_that_a_server_makes_after_it_was_asked_to_end_goes_with_it(tmp_path):
    name, ready = f"lit-grpo-test-{uuid4().hex}", tmp_path / "ready"
    command = [sys.executable, "-c", LATE_MEMORY, name, str(ready)]
    server = ServerProcess(command, {}, tmp_path / "log")
    wait_until(ready.exists)
    server.end()
    assert not is_alive(server.pid)
    assert not Path("/dev/shm", name).exists()


SEMAPHORE = """
import multiprocessing, signal, sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
lock = multiprocessing.get_context("spawn").Lock()
with open(sys.argv[1], "w") as file:
    file.write(lock._semlock.name)
while True:
    signal.pause()
"""


def test_a_semaphore_of_a_server_that_has_to_be_killed_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(server_process, "GRACE_SECONDS", 0.2)
    written = tmp_path / "name"
    server = ServerProcess([sys.executable, "-c", SEMAPHORE, str(written)], {}, tmp_path / "log")
    wait_until(lambda: written.exists() and written.read_text())
    semaphore = Path("/dev/shm", f"sem.{written.read_text().lstrip('/')}")
    assert semaphore.exists()
    server.end()
    assert not is_alive(server.pid)
    assert not semaphore.exists()


OWNER = """
import sys, time
from lit_grpo.rollout.server.scratch import ScratchDirectory
scratch = ScratchDirectory("lit-grpo-test-")
(scratch.path / "model").mkdir()
(scratch.path / "model" / "weights").write_text("large")
print(scratch.path, flush=True)
time.sleep(600)
"""


def test_a_scratch_directory_goes_with_a_killed_owner(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    path = Path(owner.stdout.readline().decode().strip())
    assert path.parent == tmp_path
    assert path.exists()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: not path.exists())


def test_a_scratch_directory_is_gone_when_it_is_removed_and_its_process_too():
    scratch = ScratchDirectory("lit-grpo-test-")
    (scratch.path / "file").write_text("")
    scratch.remove()
    assert not scratch.path.exists()
    assert not is_alive(scratch._remover.pid)


def test_a_scratch_directory_that_is_kept_stays():
    scratch = ScratchDirectory("lit-grpo-test-")
    scratch.keep()
    assert not is_alive(scratch._remover.pid)
    scratch.path.rmdir()
