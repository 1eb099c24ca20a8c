"""Runs the tests' SGLang server beside a worker process that holds named shared memory, as the
servers for GPUs do. Who starts it says in ``NAME_OF_MEMORY`` how the memory's name begins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory

WORKER = "import sys, server_with_worker; server_with_worker.hold_memory(sys.argv[1])"


def hold_memory(name: str) -> None:
    """What ends a process without a signal to it leaves the memory behind."""
    memory = shared_memory.SharedMemory(name, create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")
    signal.pause()


def main() -> None:
    name = f"{os.environ['NAME_OF_MEMORY']}-{os.getpid()}"
    folder = os.path.dirname(__file__)
    subprocess.Popen([sys.executable, "-c", WORKER, name], cwd=folder)
    os.execv(sys.executable, [sys.executable, f"{folder}/sglang_server.py", *sys.argv[1:]])


if __name__ == "__main__":
    main()
