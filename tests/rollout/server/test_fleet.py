"""What answers at a server's address may be started otherwise, of another release, or no server."""

import asyncio
import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from served_engines import QUICK
from tiny import tiny_policy

from lit_grpo.rollout import EngineFailed, Supervision, VLLMServerEngine
from lit_grpo.rollout.server.endpoint import Endpoint, ServerError, understanding

GENERATE = "POST /inference/v1/generate"
WELL = {"GET /health": {}, "POST /resume": {}, "POST /pause": {}, "POST /collective_rpc": {}}
WELL |= {"POST /reset_prefix_cache": {"success": True}, "POST /update_weight_version": {}}
WELL |= {"GET /weight_info": {"weight_version": "0"}}


@contextmanager
def answering(replies):
    """A server's address. It knows these requests, and answers 404 to others."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = replies.get(f"{self.command} {self.path.partition('?')[0]}")
            body = reply if isinstance(reply, bytes) else json.dumps(reply or {}).encode()
            with suppress(OSError):  # the engine may have broken off
                self.send_response(404 if reply is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def failure_at(url, directory) -> str:
    """Of an engine that attaches to it."""
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


def test_a_server_without_the_endpoints_for_training_says_what_it_lacks(tmp_path):
    with answering({"GET /health": {}}) as url:
        failure = failure_at(url, tmp_path)
    assert f"the inference server at {url} was looked for again 2 times in a row" in failure
    assert "POST /resume: 404" in failure
    assert "VLLM_SERVER_DEV_MODE=1" in failure


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]},
        {"choices": [{"index": 7}]},
        {"outputs": []},
        ["choices"],
    ],
)
def test_replies_of_another_release_are_trouble_that_shows_them(event, tmp_path):
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    with answering(WELL | {GENERATE: stream}) as url:
        failure = failure_at(url, tmp_path)
    assert "cannot be understood" in failure
    assert str(event) in failure


def test_a_defect_of_our_own_is_not_taken_for_the_servers():
    with pytest.raises(ServerError), understanding({}):
        raise KeyError("of the event")
    with pytest.raises(ZeroDivisionError), understanding({}):
        raise ZeroDivisionError("of ours")


def test_comments_in_a_stream_are_no_events():
    async def read(url):
        endpoint = Endpoint(url, 10)
        events = [event async for event in endpoint.events("/stream", {})]
        await endpoint.close()
        return events

    stream = b': waiting\n\ndata: {"a": 1}\n\n: ping\n\ndata: [DONE]\n\n'
    with answering({"POST /stream": stream}) as url:
        assert asyncio.run(read(url)) == [{"a": 1}]
