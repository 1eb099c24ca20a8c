"""A chat completions server on a real socket that tests script, and that keeps its requests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai.types.chat  # noqa: F401 - loaded before the first deadline of a test
from worker_processes import wait_until

from lit_grpo.judge import Judge, Limits, Price
from lit_grpo.judge import client as judge_client
from lit_grpo.judge.client import JudgeClient, Question
from lit_grpo.judge.reply import Form, Grade, Text

GRADED = Form({"explanation": Text(), "score": Grade(10)})
QUESTION = Question(messages=[{"role": "user", "content": "Grade 2."}], form=GRADED, ids=["X"])
PRICE = Price(prompt=1.0, completion=10.0)
REPLY_COST = 0.0002
"""Dollars for a reply of 100 prompt and 10 completion tokens."""


@dataclass(frozen=True)
class Reply:
    """How the server answers one request."""

    body: Any = None
    """Sent as JSON; bytes are sent as they are."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Delay before the answer."""
    is_dropped: bool = False
    """Whether the connection is closed without an answer."""


@dataclass(frozen=True)
class Section:
    """The text between the delimiters of a prompt."""

    kind: str
    id: str
    text: str


@dataclass
class Request:
    """One received request."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    time: float

    @property
    def texts(self) -> list[str]:
        return [message["content"] for message in self.body["messages"]]

    @property
    def schema(self) -> dict[str, Any] | None:
        wanted = self.body.get("response_format")
        return wanted and wanted["json_schema"]["schema"]

    @property
    def sections(self) -> list[Section]:
        """The sections of the user message, parsed as the system message says."""
        system, user = self.texts
        nonce = re.search(r"<<([0-9a-f]{16})", system)[1]
        found: list[Section] = []
        lines: list[str] | None = None
        for line in user.split("\n"):
            if lines is None and line.startswith(f"<<{nonce} "):
                kind, _, id = line.removeprefix(f"<<{nonce} ").partition(" ")
                lines = []
            elif lines is not None and line.startswith(f"{nonce}>>"):
                found.append(Section(kind, id, "\n".join(lines)))
                lines = None
            elif lines is not None:
                lines.append(line)
        return found

    def of(self, kind: str) -> list[Section]:
        return [one for one in self.sections if one.kind == kind]

    @property
    def is_probe(self) -> bool:
        """Whether it only asks if the judge can be reached, as every start does."""
        return any("Are you ready" in one["content"] for one in self.body.get("messages", ()))


Behaviour = Callable[[Request], Reply]


class JudgeServer:
    """Sends the scripted replies first, then "yes" to each probe and ``behaviour`` to the rest."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or (lambda request: says(score=10))
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._script: list[Reply] = []
        self._num_inside = 0
        self._lock = threading.Lock()
        self._is_closing = threading.Event()

    def script(self, *replies: Reply) -> None:
        """Set the next replies, one per request."""
        with self._lock:
            self._script += replies

    @property
    def questions(self) -> list[Request]:
        """The requests without the probes."""
        return [one for one in self.requests if not one.is_probe]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def judge(self, **settings: Any) -> Judge:
        """Return a judge at this server, with short timeouts by default."""
        limits = {"call_timeout_seconds": 20.0, "deadline_seconds": 60.0}
        limits |= settings.pop("limits", {})
        given = {"model": "m", "base_url": f"{self.url}/v1", "auth": "none"} | settings
        return Judge(limits=Limits(**limits), **given)

    def answer(self, request: Request) -> Reply:
        with self._lock:
            self.requests.append(request)
            self._num_inside += 1
            self.most_at_once = max(self.most_at_once, self._num_inside)
            scripted = self._script.pop(0) if self._script else None
        try:
            behaviour = ready if request.is_probe else self.behaviour
            reply = scripted or behaviour(request)
            self._is_closing.wait(reply.seconds)
            return reply
        finally:
            with self._lock:
                self._num_inside -= 1

    def __enter__(self) -> JudgeServer:
        self._http = _Http(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing.set()
        self._http.shutdown()
        self._http.server_close()


class _Http(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up, which some tests do."""


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self._answer(json.loads(body))

        def do_GET(self) -> None:
            self._answer({})

        def _answer(self, body: dict[str, Any]) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = server.answer(Request(self.path, headers, body, time.monotonic()))
            self.close_connection = reply.is_dropped
            if not reply.is_dropped:
                self._send(reply)

        def _send(self, reply: Reply) -> None:
            body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            for name, value in (headers | dict(reply.headers)).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def writes(
    text: str | None, *, finish_reason: str = "stop", seconds: float = 0.0, **message: Any
) -> Reply:
    """Reply with this text, using 100 prompt and 10 completion tokens."""
    message = {"role": "assistant", "content": text} | message
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
    return Reply(body, seconds=seconds)


def says(*, seconds: float = 0.0, **fields: Any) -> Reply:
    """Reply with the verdict on a single item."""
    return writes(json.dumps({"explanation": "because", **fields}), seconds=seconds)


def ready(request: Request) -> Reply:
    """Answer a probe."""
    return says(answer="yes")


def refuses(status: int, message: str = "no", code: str | None = None, **headers: str) -> Reply:
    """Reply with an error in OpenAI's form; underscores in header names become hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply({"error": {"message": message, "code": code}}, status=status, headers=named)


DROPS = Reply(is_dropped=True)


def once_together(server: JudgeServer, number: int, behaviour: Behaviour) -> Behaviour:
    """Hold back every reply until so many requests have been at the server at once."""

    def behave(request: Request) -> Reply:
        wait_until(lambda: server.most_at_once >= number, 15)
        return replace(behaviour(request), seconds=0.05)

    return behave


def judges(kind: str, rule: Callable[[Request, Section], Mapping[str, Any]]) -> Behaviour:
    """Return a judge that follows its instructions: it decides on each section by a fixed rule."""

    def behave(request: Request) -> Reply:
        found = request.of(kind)
        verdicts = [{"explanation": "by the rule", **rule(request, one)} for one in found]
        if len(found) == 1:
            return writes(json.dumps(verdicts[0]))
        pairs = zip(verdicts, found, strict=True)
        return writes(json.dumps({"verdicts": [{"id": one.id} | v for v, one in pairs]}))

    return behave


def first_line_is(right: str) -> Callable[[Request, Section], Mapping[str, Any]]:
    """Return a rule: 10 for an answer whose first line is the right one, 0 for all others."""
    return lambda request, one: {"score": 10 if one.text.split("\n")[0] == right else 0}


def ask(judge: Judge, *questions: Question) -> list[Any]:
    """Ask questions at the same time; return the answer or the failure of each."""
    answers, _ = ask_with_totals(judge, *questions)
    return answers


def ask_with_totals(judge: Judge, *questions: Question) -> tuple[list[Any], Mapping[str, float]]:
    """Like ``ask``, and return the totals of the client's ledger."""

    async def run() -> tuple[list[Any], Mapping[str, float]]:
        client = JudgeClient(judge)
        asked = (client.ask(one) for one in questions or [QUESTION])
        answers = await asyncio.gather(*asked, return_exceptions=True)
        totals = client.ledger.read().totals
        await client.close()
        return answers, totals

    return asyncio.run(run())


def shorten_backoff(monkeypatch: Any) -> None:
    """Make retries fast in tests that are not about the waits."""
    monkeypatch.setattr(judge_client, "FIRST_BACKOFF_SECONDS", 0.01)
