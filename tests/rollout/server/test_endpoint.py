"""Replies of servers of another release, of no server at all, and comments in streams."""

import asyncio
import json

import pytest
from http_answers import answering
from served_engines import QUICK
from tiny import tiny_policy

from lit_grpo.rollout import EngineFailed, Supervision, VLLMServerEngine
from lit_grpo.rollout.server.endpoint import (
    ConnectionFailed,
    Endpoint,
    RequestRefused,
    ServerError,
    in_words,
    reading,
)

PAGE = {"Content-Type": "text/html"}, 200, b"<!doctype html><title>Sign in</title>"
GENERATE = "POST /inference/v1/generate"
HEALTHY = {"GET /health": {}, "POST /resume": {}, "POST /pause": {}, "POST /collective_rpc": {}}
HEALTHY |= {"POST /reset_prefix_cache": {"success": True}, "POST /update_weight_version": {}}
HEALTHY |= {"GET /weight_info": {"weight_version": "0"}}


def failure_at(url, directory) -> str:
    """Return the message with which an engine that attaches to this address fails."""
    engine = VLLMServerEngine(
        urls=[url], directory=str(directory), supervision=Supervision(**QUICK)
    )
    policy = tiny_policy()
    try:
        engine.start(policy)
        with pytest.raises(EngineFailed) as error:
            engine.load_weights(policy, 0)
    finally:
        engine.close()
    return str(error.value)


def test_a_server_without_the_endpoints_for_training_is_reported_with_what_it_lacks(tmp_path):
    with answering({"GET /health": {}}) as url:
        failure = failure_at(url, tmp_path)
    assert f"the inference server at {url} was reconnected to 2 times in a row" in failure
    assert "POST /resume: 404" in failure
    assert "VLLM_SERVER_DEV_MODE=1" in failure


def test_an_event_of_another_release_is_reported_with_its_text(tmp_path):
    event = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    with answering(HEALTHY | {GENERATE: stream}) as url:
        failure = failure_at(url, tmp_path)
    assert "an unknown format" in failure
    assert str(event) in failure


def test_a_web_page_is_reported_with_what_to_check(tmp_path):
    with answering({"GET /health": {}, "POST /resume": PAGE}) as url:
        failure = failure_at(url, tmp_path)
    assert "POST /resume: status 200 with a web page, '<!doctype html>" in failure
    assert "Check that this is the address of the server itself, without /v1" in failure


def test_a_redirect_to_a_web_page_names_where_it_led():
    to_login = {"Location": "/login?secret=1"}, 302, b""
    replies = {"POST /stream": to_login, "GET /login": PAGE}
    with answering(replies) as url, pytest.raises(ServerError) as caught:
        read_events(url)
    assert str(caught.value).startswith(
        f"POST /stream: status 200 after a redirect to {url}/login with a web page, '<!doctype"
    )


def test_a_stream_without_a_body_is_reported_with_its_status():
    said = pytest.raises(ServerError, match="POST /stream: status 200 with an empty body")
    with answering({"POST /stream": b""}) as url, said:
        read_events(url)


@pytest.mark.parametrize("error", [KeyError("a"), IndexError(7), TypeError("list"), ValueError()])
def test_a_field_that_an_event_lacks_is_the_servers_error(error):
    with pytest.raises(ServerError), reading({}):
        raise error


def test_any_other_error_while_reading_an_event_is_our_own():
    with pytest.raises(ZeroDivisionError), reading({}):
        raise ZeroDivisionError


def read_events(url, path="/stream", body=None, stream_timeout=10.0):
    async def read():
        endpoint = Endpoint(url, stream_timeout)
        try:
            return [event async for event in endpoint.events(path, body)]
        finally:
            await endpoint.close()

    return asyncio.run(read())


def test_comments_in_a_stream_are_ignored():
    stream = b': waiting\n\ndata: {"a": 1}\n\n: ping\n\ndata: [DONE]\n\n'
    with answering({"POST /stream": stream}) as url:
        assert read_events(url) == [{"a": 1}]


def test_a_stream_without_its_end_fails():
    stream = b'data: {"a": 1}\n\n'
    with answering({"POST /stream": stream}) as url, pytest.raises(ServerError, match="broke off"):
        read_events(url)


@pytest.mark.parametrize(
    ("code", "error"), [(400, RequestRefused), (429, ServerError), (500, ServerError)]
)
def test_an_error_within_a_stream_is_a_refusal_or_an_error_by_its_code(code, error):
    stream = f'data: {{"error": {{"code": {code}}}}}\n\n'.encode()
    with answering({"POST /stream": stream}) as url, pytest.raises(error, match=str(code)):
        read_events(url)


def test_a_silent_stream_times_out(server):
    server.faults(hang_generate=1)
    with pytest.raises(ServerError, match="no answer in time"):
        read_events(server.url, "/generate", {"input_ids": [1]}, stream_timeout=0.2)


@pytest.mark.parametrize(
    ("has_reply", "reason"), [(True, "the server was stopped"), (False, "Connection closed")]
)
def test_a_stream_that_is_closed_as_its_reader_wakes_up_is_the_servers_error(has_reply, reason):
    """The end of an HTTP chunk wakes the reader before data is there, and the server is stopped.

    A reply that arrives at this moment is not yet known to the endpoint that is closed.
    """

    async def send_one_event(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")

    async def read():
        server = await asyncio.start_server(send_one_event, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        endpoint = Endpoint(f"http://{host}:{port}", 10.0)
        events = endpoint.events("/stream", None)
        assert await anext(events) == {}
        waiting = asyncio.create_task(anext(events))
        (reply,) = endpoint._replies
        while reply.content._waiter is None:
            await asyncio.sleep(0.01)
        reply.content._waiter.set_result(None)
        if not has_reply:
            endpoint._replies.clear()
        await endpoint.close()
        server.close()
        await waiting

    with pytest.raises(ServerError, match=reason):
        asyncio.run(read())


async def reset(writer):
    """End a connection at once, so that what was sent is answered by a reset."""
    writer.transport.abort()


async def cut_short(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf")
    await writer.drain()
    writer.close()


def failure_of_call(answer=None) -> ServerError:
    """Return the error of a call to a server that ends the connection; None listens no longer."""

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)

    async def call():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        if answer is None:
            server.close()
            await server.wait_closed()
        endpoint = Endpoint(f"http://{host}:{port}", 10.0)
        try:
            with pytest.raises(ConnectionFailed) as caught:
                await endpoint.call("POST", "/pause", {}, seconds=10)
        finally:
            await endpoint.close()
            server.close()
        return caught.value

    return asyncio.run(call())


@pytest.mark.parametrize("answer", [None, reset, cut_short], ids=["refused", "reset", "cut short"])
def test_a_lost_connection_says_what_that_means_before_the_technical_part(answer):
    assert in_words(failure_of_call(answer)).startswith(
        "the server does not answer (its process may have died): POST /pause: "
    )


def test_a_server_that_answers_with_an_error_has_not_died():
    with answering({"GET /health": {}}) as url, pytest.raises(RequestRefused) as caught:
        read_events(url)
    assert in_words(caught.value) == str(caught.value)
