"""A local HTTP server with canned replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def answering(replies: Mapping[str, Any], requests: list | None = None) -> Iterator[str]:
    """Yield the address of a server.

    Args:
        replies: Bodies by method and path, such as ``GET /health``; bytes, or an object to send as
            JSON, or a function that makes a status and one of those of the parsed body; or headers,
            a status and one of those. Other requests are answered with 404.
        requests: Gets (method and path with the query, parsed body) of each request.
    """

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if requests is not None:
                requests.append((f"{self.command} {self.path}", json.loads(body or "null")))
            reply = replies.get(f"{self.command} {self.path.partition('?')[0]}")
            status, headers = 404 if reply is None else 200, {}
            if isinstance(reply, tuple):
                headers, status, reply = reply
            if callable(reply):
                status, reply = reply(json.loads(body or "null"))
            data = reply if isinstance(reply, bytes) else json.dumps(reply or {}).encode()
            with suppress(OSError):  # the client may have disconnected
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
