"""Requests to one inference server, each with a deadline, and what became of them in two words:
refused (the request is at fault) or trouble (the server is). Knows no server's paths.
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
IDLE_SECONDS = 2.0
SHOWN_CHARACTERS = 500
TAKEN_OUT = "it has been taken out"


class RequestRefused(Exception):
    """The server understood the request and will never fulfil it (4xx)."""


class ServerError(Exception):
    """The server is gone, silent, broken or overloaded: another one, or this one later, may do."""


class ServerUnreachable(ServerError):
    """Nobody listens at its address."""


class Endpoint:
    """One server's address. Belongs to the event loop that it was made on.

    Args:
        url: Such as ``http://127.0.0.1:8000``.
        silence_seconds: A streamed reply that says nothing for so long is given up.
    """

    def __init__(self, url: str, silence_seconds: float) -> None:
        self.url = url.rstrip("/")
        self.at_close: list[Callable[[], None]] = []
        """What ends with it."""
        streaming = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds
        )
        # As many connections as requests are let in; those are counted elsewhere. Servers close
        # an idle one after 5 s, and a request that is under way to it at that moment fails.
        self._streams = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=streaming,
        )
        self._calls: set[asyncio.Task[str]] = set()
        self._replies: WeakSet[aiohttp.ClientResponse] = WeakSet()

    async def call(
        self, method: str, path: str, body: Any = None, *, seconds: float, **query: str
    ) -> Any:
        """Ask for one thing on a fresh connection; returns the reply's JSON or text.

        Raises:
            RequestRefused, ServerError
        """
        if self._streams.closed:
            raise ServerError(f"{method} {path}: {TAKEN_OUT}")
        call = asyncio.create_task(self._call(method, path, body, seconds, query))
        self._calls.add(call)
        try:
            text = await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerError(f"{method} {path}: {TAKEN_OUT}") from None
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
        async with _troubles(f"{method} {path}", seconds):
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                url = self.url + path
                async with session.request(method, url, json=body, params=query) as response:
                    return await _checked_text(response)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The server-sent events of a streamed reply, parsed.

        Raises:
            RequestRefused, ServerError: also where the stream ends before its end.
        """
        if self._streams.closed:
            raise ServerError(TAKEN_OUT)
        async with _troubles(f"POST {path}", None):
            async with self._streams.post(self.url + path, json=body) as response:
                self._replies.add(response)
                if response.status >= 400:
                    await _checked_text(response)
                buffer, is_done = b"", False
                async for chunk in response.content.iter_any():
                    *events, buffer = (buffer + chunk).split(b"\n\n")
                    for event in events:
                        data = event.partition(b"data: ")[2]
                        if data == b"[DONE]":
                            is_done = True  # read on to the end, or the connection is lost
                        elif not event.startswith(b":"):  # a comment, with which a proxy waits
                            yield _parsed(data)
            if not is_done:
                raise ServerError(f"POST {path}: the stream broke off")

    async def close(self) -> None:
        """What is being asked or streamed breaks off: a session alone would let readers wait."""
        for call in list(self._calls):
            call.cancel()
        for reply in list(self._replies):
            reply.close()
        await self._streams.close()
        for end in self.at_close:
            end()


@asynccontextmanager
async def _troubles(what: str, seconds: float | None) -> AsyncGenerator[None]:
    try:
        yield
    except TimeoutError:
        limit = f" within {seconds:g} s" if seconds else " in time"
        raise ServerError(f"{what}: no answer{limit}") from None
    except aiohttp.ClientConnectorError as error:
        raise ServerUnreachable(f"{what}: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerError(f"{what}: {type(error).__name__}: {error}") from None


def field(reply: Any, name: str) -> Any:
    """One of a JSON object.

    Raises:
        ServerError: there is none: something else answers at this address.
    """
    if not isinstance(reply, dict) or name not in reply:
        raise ServerError(f"no {name!r} in the reply {str(reply)[:SHOWN_CHARACTERS]!r}")
    return reply[name]


async def _checked_text(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    if response.status >= 400:
        _raise_for_status(response.status, text, f"{response.method} {response.url.path}: ")
    return text


def _parsed(data: bytes) -> Any:
    try:
        event = json.loads(data.decode())
    except ValueError:  # of the encoding, too
        raise ServerError(f"unreadable event {data[:SHOWN_CHARACTERS]!r}") from None
    if isinstance(event, dict) and (error := event.get("error")):
        _raise_for_status(error.get("code") if isinstance(error, dict) else None, str(error))
    return event


def _raise_for_status(status: Any, text: str, what: str = "") -> None:
    """What a failed request is, wherever its status stood."""
    message = f"{what}{status or 'error in the stream'}: {text[:SHOWN_CHARACTERS]}"
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        raise RequestRefused(message)
    raise ServerError(message)


@contextmanager
def understanding(event: Any) -> Iterator[None]:
    """Takes an event apart inside: what has another form is the server's trouble."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(
            f"an event that cannot be understood ({error!r}): {str(event)[:SHOWN_CHARACTERS]!r}"
        ) from error
