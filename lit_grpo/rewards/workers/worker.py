"""A process of its own that calls the functions of one file, so that a call can be killed.

Calls come pickled on stdin, answers go as JSON to what was stdout. It ends, with all that it
started, when stdin does. Run as a file, it imports nothing of this package and starts fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import runpy
import select
import signal
import struct
import sys
import threading
import time
from functools import lru_cache
from typing import Any

HEADER = struct.Struct("!Q")
"""Length in bytes of the call or the answer that follows."""
GRACE_SECONDS = 0.5
"""For a worker to end by itself after its stdin."""
POLL_MILLISECONDS = 1000
MAX_ERROR_CHARACTERS = 500


def main(file: str, path: list[str], max_memory_gb: float | None) -> None:
    """Forks: the child works, in a process group of its own, and this process guards it."""
    worker = os.fork()
    if worker:
        os._exit(guard(worker))
    os.setpgid(0, 0)
    sys.path[:] = path
    if max_memory_gb is not None:
        limit_memory(max_memory_gb)
    serve(file)


def guard(worker: int) -> int:
    """Ends the worker's group with the worker, at SIGTERM, or when the trainer is gone.

    Returns the worker's exit code, as shells do: 128 + n when signal n killed it. No timer of the
    worker's own could do this, since user code may hold the interpreter or set timers itself.
    """
    trainer = os.getppid()

    def kill_group(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)

    def kill_group_after_trainer() -> None:
        calls = select.poll()
        calls.register(0, 0)  # reports nothing but that the other end is closed
        # A process that the trainer forked may hold that end open after it.
        while not calls.poll(POLL_MILLISECONDS) and os.getppid() == trainer:
            pass
        time.sleep(GRACE_SECONDS)
        kill_group()

    with contextlib.suppress(OSError):
        os.setpgid(worker, worker)  # as the worker does: whoever comes first
    signal.signal(signal.SIGTERM, kill_group)
    threading.Thread(target=kill_group_after_trainer, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    kill_group()
    return code if code >= 0 else 128 - code


def limit_memory(gigabytes: float) -> None:
    """What a process allocates beyond it fails there; libraries that it maps do not count."""
    limit = int(gigabytes * 2**30)
    with contextlib.suppress(ValueError, OSError):  # a tighter limit is there already
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def serve(file: str) -> None:
    """Answers each call ``(name, *arguments)`` with what that function of the file returns."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # User code may read and print: only calls come from, and only answers go to the pipes.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=answers.close)
    while len(header := calls.read(HEADER.size)) == HEADER.size:
        answer = answer_call(file, calls.read(*HEADER.unpack(header)))
        if answers.closed:
            os._exit(0)  # user code forked, and its child came back here
        answers.write(HEADER.pack(len(answer)) + answer)
        answers.flush()


def answer_call(file: str, call: bytes) -> bytes:
    """``{"result": …}``, or ``{"error": …}`` with the exception as text.

    JSON, because the trainer must not unpickle what a process that ran foreign code has written.
    """
    try:
        name, *arguments = pickle.loads(call)
        return json.dumps({"result": load(file)[name](*arguments)}).encode()
    except BaseException as error:  # user code may raise anything, and the worker must live on
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        return json.dumps({"error": text}).encode()


@lru_cache
def load(file: str) -> dict[str, Any]:
    return runpy.run_path(file)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
