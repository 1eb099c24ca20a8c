"""A judge behind OpenAI's API, in a process of its own, that fails on request.

It reads prompts as their system message says, grades by a fixed rule, and can be slow, unreliable
or down. A run is checked against `grade`, the rule itself.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

MAX_GRADE = 10
FULL_LENGTH = 60
"""Characters of an answer that is as long as can be."""
RETRY_AFTER_SECONDS = 0.2


@dataclass(frozen=True)
class Behaviour:
    """How the judge answers.

    Args:
        latency: Seconds per call.
        failure_rate: Share of the calls that fail.
        is_down: Fail every call.
        is_denied: Refuse the credentials of every call.
    """

    latency: float = 0.0
    failure_rate: float = 0.0
    is_down: bool = False
    is_denied: bool = False


def grade(answer: str) -> int:
    """Return 1 to 10 by the share of digits. It is never 0, so a score of 0 is an invented one."""
    share = sum(character.isdigit() for character in answer) / max(1, len(answer))
    return 1 + round((MAX_GRADE - 1) * share)


def grade_by(rubric: str, answer: str) -> int:
    """Return 1 to 10 by the digits, the length or the shortness of an answer, as a rubric asks."""
    length = min(1.0, len(answer) / FULL_LENGTH)
    if "digits" in rubric:
        return grade(answer)
    if "longer" in rubric or "shorter" in rubric:
        return 1 + round((MAX_GRADE - 1) * (length if "longer" in rubric else 1 - length))
    return MAX_GRADE // 2


class ToyJudge:
    """A client of the judge's process."""

    def __init__(self, url: str) -> None:
        self.url = url

    def set(self, **behaviour: Any) -> None:
        """Change fields of its `Behaviour`."""
        body = json.dumps(behaviour).encode()
        urlopen(Request(f"{self.url}/behaviour", body), timeout=10).close()

    def counts(self) -> dict[str, int]:
        """Return the number of calls by kind of answer."""
        with urlopen(f"{self.url}/counts", timeout=10) as reply:
            counts: dict[str, int] = json.load(reply)
            return counts


@contextlib.contextmanager
def toy_judge(**behaviour: Any) -> Iterator[ToyJudge]:
    """Start the process and end it on exit."""
    command = [sys.executable, str(Path(__file__)), json.dumps(behaviour)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        yield ToyJudge(f"http://127.0.0.1:{process.stdout.readline().strip()}")
    finally:
        process.terminate()
        process.wait()


class Server:
    """The judge itself: an HTTP server on a free port, which it prints."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.counts: dict[str, int] = {}
        self._random = random.Random(0)

    async def serve(self) -> None:
        server = await asyncio.start_server(self._serve_client, "127.0.0.1", 0)
        threading.Thread(target=exit_with_parent, daemon=True).start()
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _serve_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
        if path == "/behaviour":
            self.behaviour = replace(self.behaviour, **json.loads(body))
            return reply(200, asdict(self.behaviour))
        if path == "/counts":
            return reply(200, self.counts)
        await asyncio.sleep(self.behaviour.latency)
        kind = self._kind_of_answer()
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return ANSWERS[kind](json.loads(body))

    def _kind_of_answer(self) -> str:
        if self.behaviour.is_denied:
            return "denied"
        if self.behaviour.is_down:
            return "unavailable"
        if self._random.random() < self.behaviour.failure_rate:
            return self._random.choice(
                [kind for kind in ANSWERS if kind not in ("verdict", "denied")]
            )
        return "verdict"


def exit_with_parent() -> None:
    """Exit on EOF of stdin: the parent holds the other end and has ended."""
    sys.stdin.read()
    os._exit(0)


def reply(status: int, content: Any, headers: str = "") -> bytes:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def chat_reply(text: str | None, finish_reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    usage = {"prompt_tokens": 300, "completion_tokens": 30, "total_tokens": 330}
    return reply(200, {"id": "c", "object": "chat.completion", "created": 0, "model": "toy",
                       "choices": [choice], "usage": usage})  # fmt: skip


def verdict(request: dict[str, Any]) -> bytes:
    """Grade every answer between the marks of this call."""
    if len(request["messages"]) == 1:
        return chat_reply(json.dumps({"answer": "ready"}))
    system, user = (message["content"] for message in request["messages"])
    nonce = re.search(r"<<([0-9a-f]{16})", system)[1]  # type: ignore[index]
    marks = rf"^<<{nonce} answer (\w+)\n(.*?)\n{nonce}>>$"
    found = re.findall(marks, user, re.DOTALL | re.MULTILINE)
    rubric = re.search(rf"^<<{nonce} rubric\n(.*?)\n{nonce}>>$", user, re.DOTALL | re.MULTILINE)
    scores = {id: grade_by(rubric[1], text) if rubric else grade(text) for id, text in found}
    grades = [{"id": id, "explanation": "so", "score": score} for id, score in scores.items()]
    return chat_reply(json.dumps({"verdicts": grades} if len(grades) > 1 else grades[0]))


def error(status: int, headers: str = "") -> bytes:
    return reply(status, {"error": {"message": "a failure on purpose", "code": None}}, headers)


ANSWERS: dict[str, Callable[[Any], bytes | None]] = {
    "verdict": verdict,
    "denied": lambda _: error(401),
    "rate_limited": lambda _: error(429, f"retry-after: {RETRY_AFTER_SECONDS}\r\n"),
    "unavailable": lambda _: error(503),
    "crashed": lambda _: error(500),
    "dropped": lambda _: None,
    "prose": lambda _: chat_reply("I would call it a rather good answer."),
    "out of range": lambda _: chat_reply(json.dumps({"explanation": "superb", "score": 11})),
    "empty": lambda _: chat_reply(None),
    "cut off": lambda _: chat_reply('{"explanation": "well, the', "length"),
    "filtered": lambda _: chat_reply(None, "content_filter"),
}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(Behaviour(**json.loads(sys.argv[1]))).serve())
