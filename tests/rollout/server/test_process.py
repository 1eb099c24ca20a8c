"""A server's processes end with it, and its log keeps what explains the end."""

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from worker_processes import is_alive, wait_until

from lit_grpo.rollout.server.process import ServerProcess


def test_a_forked_process_that_holds_the_pipe_does_not_keep_a_server_running(tmp_path):
    server = ServerProcess(["sleep", "600"], {}, tmp_path / "log")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        server.stop()
        assert server._guard.returncode != -signal.SIGKILL, "the guard was not told to stop"
        assert not is_alive(server.pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


MAPS = """
import mmap, sys, time
files = [open(path, "rb") for path in sys.argv[2:]]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def test_shared_memory_that_existed_before_and_files_in_folders_of_it_stay(tmp_path):
    """A folder there may hold a model's weights."""
    folder = Path(tempfile.mkdtemp(prefix="lit-grpo-test-", dir="/dev/shm"))
    files = [folder / "model.safetensors", Path(f"{folder}-other")]
    try:
        for file in files:
            file.write_bytes(b"weights")
        ready = tmp_path / "ready"
        command = [sys.executable, "-c", MAPS, str(ready), *map(str, files)]
        server = ServerProcess(command, {}, tmp_path / "log")
        wait_until(ready.exists)
        server.stop()
        assert [file.read_bytes() for file in files] == [b"weights", b"weights"]
    finally:
        files[1].unlink(missing_ok=True)
        shutil.rmtree(folder)


def test_the_tail_of_a_log_begins_with_the_errors_that_came_before_it(tmp_path):
    said = ["RuntimeError: the cause", "RuntimeError: the cause", "EngineDeadError: see above"]
    said += [f"leaked {number}" for number in range(30)]
    server = ServerProcess(["printf", "%s\\n", *said], {}, tmp_path / "log")
    wait_until(lambda: not server.is_running)
    server.stop()
    last = [f"leaked {number}" for number in range(27, 30)]
    assert server.log_tail(3).split("\n") == [said[0], said[2], "...", *last]


def test_the_log_is_private_and_its_end_is_quoted_without_the_secret(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    said = ["ValueError: the key is s3cret", *["more"] * 20, "server_args={'api_key': 's3cret'}"]
    server = ServerProcess(["printf", "%s\\n", *said], {}, log, secret="s3cret")
    wait_until(lambda: not server.is_running)
    server.stop()
    assert log.stat().st_mode & 0o777 == 0o600
    tail = server.log_tail()
    assert "s3cret" not in tail
    assert "ValueError: the key is [api key]" in tail
    assert tail.endswith("server_args={'api_key': '[api key]'}")
