"""A middleware for servers that take one by its name: keeps the bodies of requests for completions,
a line of JSON each, in the file that ``RECORDED_REQUESTS`` names. It runs in the server's own
environment, with nothing of ours.
"""

import os
from pathlib import Path

PATH = "/inference/v1/generate"


class Recorder:
    """An ASGI application around another one."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope.get("path") == PATH:
            receive = _keeping(receive)
        await self._app(scope, receive, send)


def _keeping(receive):
    body = b""

    async def receive_and_keep():
        nonlocal body
        message = await receive()
        if message["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                _keep(body)
        return message

    return receive_and_keep


def _keep(body: bytes) -> None:
    with Path(os.environ["RECORDED_REQUESTS"]).open("ab") as file:
        file.write(body + b"\n")
