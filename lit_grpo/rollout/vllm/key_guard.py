"""Middleware for vLLM servers: refuse requests without the key in ``VLLM_API_KEY``.

vLLM's own check leaves the endpoints that update weights open. A server imports a copy of this
file, so it imports nothing from the package.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no key, for monitoring; SGLang also leaves these open."""


class KeyGuard:
    """An ASGI application that passes requests with the key on to another one."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _has_key(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
