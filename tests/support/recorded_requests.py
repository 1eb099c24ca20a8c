"""A middleware that records requests for completions, for servers that load one by its name.

Each body is a line of the file that ``RECORDED_REQUESTS`` names. The module runs in the server's
environment, so it imports nothing from this project.
"""

import os
from pathlib import Path

PATH = "/inference/v1/generate"


class Recorder:
    """An ASGI middleware."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope.get("path") == PATH:
            receive = _recording(receive)
        await self._app(scope, receive, send)


def _recording(receive):
    body = b""

    async def receive_and_record():
        nonlocal body
        message = await receive()
        if message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                _record(body)
        return message

    return receive_and_record


def _record(body: bytes) -> None:
    with Path(os.environ["RECORDED_REQUESTS"]).open("ab") as file:
        file.write(body + b"\n")
