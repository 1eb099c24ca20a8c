"""A pool of worker processes for math-verify, each of which may hang, crash or be killed.

It belongs to the event loop that first asks it. It holds no lock over the trainer's interpreter
and sets no signal in the trainer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("_math_worker.py")
START_SECONDS = 60.0


class MathWorkerError(RuntimeError):
    """A worker that could not start, died, or failed to compare two answers."""


class MathPool:
    """At most ``num_workers`` processes, started when first needed and replaced when killed."""

    def __init__(self, num_workers: int, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def is_equal(self, gold: str, answer: str) -> bool:
        """Whether the answer means the same as the gold.

        Raises:
            TimeoutError: it took longer than the deadline; the worker was killed.
            MathWorkerError: the worker died or failed.
        """
        return bool(await self._ask({"gold": gold, "answer": answer}))

    async def is_answer(self, gold: str) -> bool:
        """Whether answers can be compared with the gold; raises like ``is_equal``."""
        return bool(await self._ask({"gold": gold}))

    async def close(self) -> None:
        """Kills every worker, also the busy ones."""
        await asyncio.gather(*(self._kill(worker) for worker in tuple(self._all)))

    async def _ask(self, request: dict[str, str]) -> Any:
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start_worker()
            try:
                async with asyncio.timeout(self._deadline_seconds):
                    reply = await worker.ask(request)
            except TimeoutError:
                await self._kill(worker)
                limit = self._deadline_seconds
                raise TimeoutError(f"no verdict within {limit:g} s (deadline_seconds)") from None
            except BaseException:
                await self._kill(worker)
                raise
            self._idle.append(worker)
        if "error" in reply:
            raise MathWorkerError(reply["error"])
        return reply["result"]

    async def _start_worker(self) -> _Worker:
        # -P keeps this directory off the path, where math.py would stand in for the real one.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(WORKER), str(self._deadline_seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        worker = _Worker(process)
        self._all.add(worker)
        try:
            async with asyncio.timeout(START_SECONDS):
                await worker.read()
        except (TimeoutError, MathWorkerError) as error:
            await self._kill(worker)
            raise RuntimeError(
                f"math-verify could not be started. `{sys.executable} -P {WORKER} 2` says why."
            ) from error
        except BaseException:
            await self._kill(worker)
            raise
        return worker

    async def _kill(self, worker: _Worker) -> None:
        self._all.discard(worker)
        await worker.kill()


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, request: dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.read()

    async def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise MathWorkerError(f"the math-verify worker died (exit code {code})")
        return json.loads(line)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
