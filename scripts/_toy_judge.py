"""A judge behind OpenAI's API, as a process of its own that fails as it is told.

It reads a prompt as its system message says, grades by a fixed rule, and can be slow, unreliable
or down. `grade` is the truth that a run is checked against.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

HIGHEST = 10
RETRY_AFTER_SECONDS = 0.2


@dataclass(frozen=True)
class Mood:
    """How the judge behaves: seconds a call, the share of calls that fail, down altogether."""

    latency: float = 0.0
    failure_rate: float = 0.0
    is_down: bool = False


def grade(answer: str) -> int:
    """From 1 to 10 by the share of digits: a zero is never right, so one could only be invented."""
    share = sum(character.isdigit() for character in answer) / max(1, len(answer))
    return 1 + round((HIGHEST - 1) * share)


class ToyJudge:
    """The judge's process, seen from the outside."""

    def __init__(self, url: str) -> None:
        self.url = url

    def set(self, **mood: Any) -> None:
        """Change how it behaves from now on."""
        urlopen(Request(f"{self.url}/mood", json.dumps(mood).encode()), timeout=10).close()

    def counts(self) -> dict[str, int]:
        """Calls by what became of them."""
        with urlopen(f"{self.url}/counts", timeout=10) as reply:
            return json.load(reply)


@contextlib.contextmanager
def toy_judge(**mood: Any) -> Iterator[ToyJudge]:
    """Starts the process and ends it."""
    command = [sys.executable, str(Path(__file__)), json.dumps(mood)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        yield ToyJudge(f"http://127.0.0.1:{process.stdout.readline().strip()}")
    finally:
        process.terminate()
        process.wait()


# Inside the process


class Server:
    """Answers HTTP on one port."""

    def __init__(self, mood: Mood) -> None:
        self.mood = mood
        self.counts: dict[str, int] = {}
        self._random = random.Random(0)

    async def serve(self) -> None:
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        threading.Thread(target=end_with_starter, daemon=True).start()
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                reply = await self._answer(head.split()[1], body)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
        writer.close()

    async def _answer(self, path: str, body: bytes) -> bytes | None:
        if path == "/mood":
            self.mood = replace(self.mood, **json.loads(body))
            return reply(200, asdict(self.mood))
        if path == "/counts":
            return reply(200, self.counts)
        await asyncio.sleep(self.mood.latency)
        kind = self._kind()
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return ANSWERS[kind](json.loads(body))

    def _kind(self) -> str:
        if self.mood.is_down:
            return "unavailable"
        if self._random.random() < self.mood.failure_rate:
            return self._random.choice([kind for kind in ANSWERS if kind != "verdict"])
        return "verdict"


def end_with_starter() -> None:
    """Whoever started this process holds the other end of its stdin, until it is gone."""
    sys.stdin.read()
    os._exit(0)


def reply(status: int, content: Any, headers: str = "") -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def says(text: str | None, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    usage = {"prompt_tokens": 300, "completion_tokens": 30, "total_tokens": 330}
    return reply(200, {"id": "c", "object": "chat.completion", "created": 0, "model": "toy",
                       "choices": [choice], "usage": usage})  # fmt: skip


def verdict(request: dict[str, Any]) -> bytes:
    """Grades every answer between the marks of this call, and nothing else."""
    if len(request["messages"]) == 1:
        return says(json.dumps({"answer": "ready"}))
    system, user = (message["content"] for message in request["messages"])
    nonce = re.search(r"<<([0-9a-f]{16})", system)[1]  # type: ignore[index]
    marks = rf"^<<{nonce} answer (\w+)\n(.*?)\n{nonce}>>$"
    found = re.findall(marks, user, re.DOTALL | re.MULTILINE)
    grades = [{"id": id, "explanation": "digits", "score": grade(text)} for id, text in found]
    return says(json.dumps({"verdicts": grades} if len(grades) > 1 else grades[0]))


def error(status: int, headers: str = "") -> bytes:
    return reply(status, {"error": {"message": "a failure on purpose", "code": None}}, headers)


ANSWERS: dict[str, Any] = {
    "verdict": verdict,
    "rate_limited": lambda _: error(429, f"retry-after: {RETRY_AFTER_SECONDS}\r\n"),
    "unavailable": lambda _: error(503),
    "crashed": lambda _: error(500),
    "dropped": lambda _: None,
    "prose": lambda _: says("I would call it a rather good answer."),
    "out of range": lambda _: says(json.dumps({"explanation": "superb", "score": 11})),
    "empty": lambda _: says(None),
    "cut off": lambda _: says('{"explanation": "well, the', "length"),
    "filtered": lambda _: says(None, "content_filter"),
}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(Mood(**json.loads(sys.argv[1]))).serve())
