"""The main program of a worker process, which calls the functions of one file.

Calls arrive pickled on stdin, answers leave as JSON on the original stdout. The worker and its
child processes end at EOF on stdin. It imports nothing of this package, so it starts fast.
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
"""Length in bytes of the following call or answer."""
GRACE_SECONDS = 0.5
"""Time for a worker to exit by itself after EOF on its stdin."""
POLL_MILLISECONDS = 1000
MAX_ERROR_CHARACTERS = 500


def main(file: str, path: list[str], max_memory_gb: float | None) -> None:
    """Fork: the child is the worker, in its own process group, and this process guards it."""
    worker = os.fork()
    if worker:
        os._exit(guard(worker))
    os.setpgid(0, 0)
    sys.path[:] = path
    if max_memory_gb is not None:
        limit_memory(max_memory_gb)
    serve(file)


def guard(worker: int) -> int:
    """Kill the worker's process group when the worker ends, at SIGTERM, or without the trainer.

    A timer in the worker could not do this, since user code may hold the interpreter or set timers
    itself. Return the worker's exit code in the form of shells: 128 + n if signal n killed it.
    """
    trainer = os.getppid()

    def kill_group(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)

    def kill_group_after_trainer() -> None:
        calls = select.poll()
        calls.register(0, 0)  # reports only that the other end is closed
        # The parent is checked as well: a process that the trainer forked may hold that end open.
        while not calls.poll(POLL_MILLISECONDS) and os.getppid() == trainer:
            pass
        time.sleep(GRACE_SECONDS)
        kill_group()

    with contextlib.suppress(OSError):
        os.setpgid(worker, worker)  # the worker does the same; the first one wins
    signal.signal(signal.SIGTERM, kill_group)
    threading.Thread(target=kill_group_after_trainer, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    kill_group()
    return code if code >= 0 else 128 - code


def limit_memory(gigabytes: float) -> None:
    """Make allocations beyond the limit fail; mapped libraries do not count."""
    limit = int(gigabytes * 2**30)
    with contextlib.suppress(ValueError, OSError):  # there is a tighter limit already
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def serve(file: str) -> None:
    """Answer each call ``(name, *arguments)`` with the result of that function of the file."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # User code may read stdin and print, so it gets other descriptors than the pipes.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=answers.close)
    while len(header := calls.read(HEADER.size)) == HEADER.size:
        answer = answer_call(file, calls.read(*HEADER.unpack(header)))
        if answers.closed:
            os._exit(0)  # user code forked, and this is the child
        answers.write(HEADER.pack(len(answer)) + answer)
        answers.flush()


def answer_call(file: str, call: bytes) -> bytes:
    """Return ``{"result": …}``, or ``{"error": …}`` with the exception as text, in JSON.

    It is not a pickle, since the trainer must not unpickle data from a process that ran foreign
    code.
    """
    try:
        name, *arguments = pickle.loads(call)
        return json.dumps({"result": load(file)[name](*arguments)}).encode()
    except BaseException as error:  # user code may raise anything, and the worker must continue
        text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        return json.dumps({"error": text}).encode()


@lru_cache
def load(file: str) -> dict[str, Any]:
    return runpy.run_path(file)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
