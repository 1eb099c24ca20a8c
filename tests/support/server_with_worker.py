"""Run the test server beside a worker process with named shared memory, as servers for GPUs do.

The environment variable ``NAME_OF_MEMORY`` is the start of the memory's name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory

WORKER = "import sys, server_with_worker; server_with_worker.hold_memory(sys.argv[1])"


def hold_memory(name: str) -> None:
    """Create shared memory that stays when this process is killed."""
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
