"""A pool of worker processes that call the functions of a file, with a deadline for each call.

A worker that hangs or crashes is killed and replaced. The pool belongs to one event loop, and
installs no signal handlers in the trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from lit_grpo.rewards.workers.worker import HEADER

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 300.0
END_SECONDS = 0.7
"""A little more than the grace period of a worker."""


class WorkerError(RuntimeError):
    """A worker died, or its function raised."""


class WorkerStartError(RuntimeError):
    """A worker could not start."""


class WorkerPool:
    """At most ``num_workers`` processes that call functions of one file.

    A worker starts when it is first needed, with the trainer's ``sys.path``, and is replaced if it
    dies or is killed.

    Args:
        file: Defines the functions, which must return JSON values.
        first_call: ``(name, *arguments)`` of the first call in every worker.
        num_workers: Maximum number of processes.
        deadline_seconds: Timeout of one call; the worker is then killed.
        max_memory_gb: GiB that one process may allocate; None for no limit.
        stderr: Where workers print, including to stdout; None for the trainer's stderr.
    """

    def __init__(
        self,
        file: Path,
        first_call: tuple[Any, ...],
        *,
        num_workers: int,
        deadline_seconds: float,
        max_memory_gb: float | None,
        stderr: int | None = None,
    ) -> None:
        self._file = file
        self._first_call = pickle.dumps(first_call)
        self._deadline_seconds = deadline_seconds
        self._max_memory_gb = max_memory_gb
        self._stderr = stderr
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def start(self) -> None:
        """Start one worker, so that errors show before it is needed.

        Raises:
            WorkerStartError: it could not start.
        """
        async with self._slots:
            self._idle.append(await self._start_worker())

    async def call(self, name: str, *arguments: Any, has_deadline: bool = True) -> Any:
        """Call a function in a worker and return its result.

        Raises:
            TimeoutError: it took longer than the deadline; the worker and all its child processes
                were killed.
            WorkerError: the worker died or the function raised.
            WorkerStartError: no worker was idle, and none could start.
        """
        call = pickle.dumps((name, *arguments))
        limit = self._deadline_seconds if has_deadline else None
        async with self._slots:
            worker = await self._take_worker()
            answer = await self._ask(worker, call, limit)
            self._idle.append(worker)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    async def close(self) -> None:
        """Let idle workers exit and kill busy ones."""
        idle, self._idle = self._idle, []
        busy = self._all.difference(idle)
        self._all.clear()
        await asyncio.gather(*(one.end() for one in idle), *(one.kill() for one in busy))

    async def _take_worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self._kill(worker)
        return await self._start_worker()

    async def _start_worker(self) -> _Worker:
        settings = {
            "file": str(self._file),
            "path": sys.path,
            "max_memory_gb": self._max_memory_gb,
        }
        # -P keeps this directory off sys.path, where its files could shadow other modules.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-u", str(WORKER), json.dumps(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,  # Ctrl-C goes to the trainer only
        )
        worker = _Worker(process)
        self._all.add(worker)
        try:
            answer = await self._ask(worker, self._first_call, START_SECONDS)
        except TimeoutError as error:
            raise WorkerStartError(f"a worker took over {START_SECONDS:g} s to start") from error
        except WorkerError as error:
            raise WorkerStartError(f"a worker could not start: {error}") from error
        if "error" in answer:
            await self._kill(worker)
            raise WorkerStartError(f"a worker could not start: {answer['error']}")
        return worker

    async def _ask(self, worker: _Worker, call: bytes, limit: float | None) -> dict[str, Any]:
        """Return the worker's answer; kill the worker if there is none within the limit."""
        try:
            async with asyncio.timeout(limit):
                return await worker.ask(call)
        except TimeoutError:
            await self._kill(worker)
            raise TimeoutError(
                f"no answer within {limit:g} s (deadline_seconds); the worker was killed"
            ) from None
        except BaseException:
            await self._kill(worker)
            raise

    async def _kill(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.kill()


class _Worker:
    """The trainer's end of one worker. The process is the guard, the parent of the worker."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._calls = process.stdin
        self._answers = process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, call: bytes) -> dict[str, Any]:
        """Send a call and read the answer.

        Raises:
            WorkerError: the worker died.
        """
        self._calls.write(HEADER.pack(len(call)) + call)
        try:
            with contextlib.suppress(ConnectionError):  # reading the answer says why
                await self._calls.drain()
            (length,) = HEADER.unpack(await self._answers.readexactly(HEADER.size))
            answer: dict[str, Any] = json.loads(await self._answers.readexactly(length))
            return answer
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise WorkerError(f"the worker died ({_describe(code)})") from None

    async def end(self) -> None:
        """Let an idle worker exit by closing its stdin."""
        self._calls.close()
        await self._wait()
        await self.kill()  # a process that the trainer forked may hold the pipe open

    async def kill(self) -> None:
        """Kill the worker and all its child processes."""
        if not self._calls.is_closing():
            self._calls.transport.abort()
        if self.is_alive:
            self._process.terminate()  # the guard kills the worker's whole group
        await self._wait()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()


def _describe(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"exit code {exit_code}, {signal.Signals(exit_code - 128).name}"
    return f"exit code {exit_code}"
