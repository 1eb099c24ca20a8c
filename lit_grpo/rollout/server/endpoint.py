"""HTTP requests to one inference server, each with a timeout.

Every failure raises ``RequestRefused`` (a bad request, do not retry it) or ``ServerError`` (a retry
may succeed). Paths and fields are left to ``ServerAPI``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakSet

import aiohttp

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 2.0
MAX_SHOWN_CHARACTERS = 500
MAX_SHOWN_OF_PAGE = 100
STOPPED = "the server was stopped"
BROKE_OFF = "the stream broke off"
HTML = "text/html"
KEY_NEEDED = (
    "it requires an API key: export the key, and set model.engine.init_args.api_key_variable, or "
    "that of model.teacher, to the name of its environment variable"
)


class RequestRefused(Exception):
    """The server rejects the request (4xx), so a retry is useless."""


class ServerError(Exception):
    """The server is down, silent, broken or overloaded, so a retry may succeed."""


class ConnectionFailed(ServerError):
    """The connection was refused, or broke off."""


class ServerUnreachable(ConnectionFailed):
    """Nothing listens at the server's address."""


class OtherProgram(ServerError):
    """The reply was a web page, so another program listens at the address: waiting is no use."""


def in_words(error: ServerError | RequestRefused) -> str:
    """Return the error of a server that has answered before, prefixed with an explanation."""
    if isinstance(error, ConnectionFailed):
        return f"the server does not answer (its process may have died): {error}"
    return str(error)


class Endpoint:
    """The address of one server, bound to the event loop on which it is created.

    Args:
        url: An address such as ``http://127.0.0.1:8000``.
        stream_timeout: Seconds without data after which a streamed reply fails.
        api_key: Key to send with every request; None for none.
    """

    def __init__(self, url: str, stream_timeout: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        """Headers of every request."""
        self.on_close: list[Callable[[], None]] = []
        """Functions that ``close`` calls."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=stream_timeout
        )
        # The dispatcher limits the connections. Servers close idle ones after 5 s, and a request
        # sent at that moment would fail, so close them earlier here.
        self._streams = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=timeout,
            headers=self.headers,
        )
        self._calls: set[asyncio.Task[str]] = set()
        self._replies: WeakSet[aiohttp.ClientResponse] = WeakSet()

    async def call(
        self, method: str, path: str, body: Any = None, *, seconds: float, **query: str
    ) -> Any:
        """Send a request on a new connection; return the reply's JSON, or its text.

        Raises:
            RequestRefused, ServerError
        """
        if self._streams.closed:
            raise ServerError(f"{method} {path}: {STOPPED}")
        call = asyncio.create_task(self._call(method, path, body, seconds, query))
        self._calls.add(call)
        try:
            text = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerError(f"{method} {path}: {STOPPED}") from None
        finally:
            self._calls.discard(call)
        try:
            return json.loads(text)
        except ValueError:
            return text

    async def _call(
        self, method: str, path: str, body: Any, seconds: float, query: Mapping[str, str]
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with _as_server_errors(f"{method} {path}", seconds):
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=self.headers
            ) as session:
                url = self.url + path
                async with session.request(method, url, json=body, params=query) as response:
                    return await _read_text(response)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """Yield the parsed server-sent events of a streamed reply.

        Raises:
            RequestRefused, ServerError: also if the stream ends before its ``[DONE]``.
        """
        if self._streams.closed:
            raise ServerError(STOPPED)
        async with _as_server_errors(f"POST {path}", None):
            async with self._streams.post(self.url + path, json=body) as response:
                self._replies.add(response)
                if response.status >= 400 or response.content_type == HTML:
                    await _read_text(response)
                buffer, is_done, is_empty = b"", False, True
                async for chunk in _chunks(response):
                    is_empty = False
                    *events, buffer = (buffer + chunk).split(b"\n\n")
                    for event in events:
                        data = event.partition(b"data: ")[2]
                        if data == b"[DONE]":
                            is_done = True  # read to the end, so that the connection can be reused
                        elif not event.startswith(b":"):  # a comment, which keeps the stream alive
                            yield _parse(data or event)
            if not is_done:
                ended = f"status {response.status} with an empty body" if is_empty else BROKE_OFF
                raise ServerError(f"POST {path}: {ended}")

    async def close(self) -> None:
        """Abort all requests; closing the session alone would leave readers of streams waiting."""
        for call in list(self._calls):
            call.cancel()
        for reply in list(self._replies):
            reply.close()
        await self._streams.close()
        for function in self.on_close:
            function()


@asynccontextmanager
async def _as_server_errors(what: str, seconds: float | None) -> AsyncGenerator[None]:
    try:
        yield
    except TimeoutError:
        limit = f" within {seconds:g} s" if seconds else " in time"
        raise ServerError(f"{what}: no answer{limit}") from None
    except aiohttp.ClientConnectorError as error:
        raise ServerUnreachable(f"{what}: {error}") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise ConnectionFailed(f"{what}: {type(error).__name__}: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"{what}: {type(error).__name__}: {error}") from None


def require_field(reply: Any, name: str) -> Any:
    """Return a field of a JSON object.

    Raises:
        ServerError: it is missing, for example because a different program answers here.
    """
    if not isinstance(reply, dict) or name not in reply:
        raise ServerError(f"no {name!r} in {_shown(reply)}")
    return reply[name]


def _shown(reply: Any) -> str:
    """Return a reply for a message."""
    return "an empty reply" if reply == "" else f"the reply {str(reply)[:MAX_SHOWN_CHARACTERS]!r}"


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except RuntimeError as error:  # aiohttp's, if a reader wakes up after its connection was closed
        reason = STOPPED if response.closed else response.content.exception() or error
        raise ServerError(str(reason)) from None


async def _read_text(response: aiohttp.ClientResponse) -> str:
    """Return the body of a reply.

    Raises:
        RequestRefused, ServerError: it is an error.
        OtherProgram: it is a web page, which none of the servers sends.
    """
    text = await response.text()
    if response.status >= 400:
        _raise_for_status(response.status, text, f"{response.method} {response.url.path}: ")
    if response.content_type == HTML:
        first = (*response.history, response)[0]
        moved = f" after a redirect to {response.url.with_query(None)}" if response.history else ""
        raise OtherProgram(
            f"{first.method} {first.url.path}: status {response.status}{moved} with a web page, "
            f"{text[:MAX_SHOWN_OF_PAGE]!r}. Check that this is the address of the server itself, "
            "without /v1 and not that of a proxy"
        )
    return text


def _parse(data: bytes) -> Any:
    try:
        event = json.loads(data.decode())
    except ValueError:  # invalid JSON or invalid UTF-8
        raise ServerError(f"unreadable event {data[:MAX_SHOWN_CHARACTERS]!r}") from None
    if isinstance(event, dict) and (error := event.get("error")):
        _raise_for_status(error.get("code") if isinstance(error, dict) else None, str(error))
    return event


def _raise_for_status(status: object, text: str, what: str = "") -> None:
    """Raise for a failed request, whether its status was in the header or in the stream."""
    message = f"{what}{status or 'error in the stream'}: {text[:MAX_SHOWN_CHARACTERS]}"
    if status == 401:
        message += f" ({KEY_NEEDED})"
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        raise RequestRefused(message)
    raise ServerError(message)


@contextmanager
def reading(event: object) -> Iterator[None]:
    """Raise ``ServerError`` if the event lacks the fields that are read within this context."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(f"an unknown format ({error!r}): {_shown(event)}") from error
