"""A local Hugging Face Hub that takes uploads, for the real client of ``huggingface_hub``."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TOKEN = "hf_of_this_test"


@dataclass
class FakeHub:
    """What the Hub was sent."""

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of the requests for a new repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    """path in the repository -> content"""
    fails: bool = False
    """Whether commits are answered with a server error."""

    @property
    def is_private(self) -> bool:
        (body,) = self.created
        return body.get("visibility") == "private" or bool(body.get("private"))

    def reply(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/{self._repo_id()}"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path == f"/api/models/{self._repo_id()}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": name, **mode} for name in names]}
        if path == f"/api/models/{self._repo_id()}/commit/main" and not self.fails:
            self._commit([json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.url}/{self._repo_id()}/commit/1", "commitOid": "1"}
        return 403, {"error": "not here"}

    def _repo_id(self) -> str:
        body = self.created[-1]
        return f"{body['organization']}/{body['name']}"

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "file":
                value = line["value"]
                self.files[value["path"]] = base64.b64decode(value["content"])


@contextmanager
def serving_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a Hub, and point the client of this process at it with a valid token."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, reply = hub.reply(self.path, body) if has_token else (401, {"error": "who?"})
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # needs a storage
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
