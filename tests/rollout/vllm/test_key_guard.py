"""The middleware that guards every endpoint of a vLLM server."""

import asyncio

import pytest

from lit_grpo.rollout.vllm.key_guard import KeyGuard

OURS = (b"authorization", b"Bearer right")


@pytest.fixture
def guard(monkeypatch):
    async def application(scope, receive, send):
        await send("answered")

    monkeypatch.setenv("VLLM_API_KEY", "right")
    return KeyGuard(application)


def sent(guard, path="/collective_rpc", headers=(), kind="http"):
    messages = []

    async def send(message):
        messages.append(message)

    scope = {"type": kind, "path": path, "headers": headers, "method": "POST"}
    asyncio.run(guard(scope, None, send))
    return messages


def test_a_request_with_the_key_is_answered(guard):
    assert sent(guard, headers=[(b"host", b"x"), OURS]) == ["answered"]
    assert sent(guard, headers=[OURS], kind="websocket") == ["answered"]


@pytest.mark.parametrize("path", ["/collective_rpc", "/v1/models", "/health/../pause", "/metricsx"])
@pytest.mark.parametrize(
    "value", [None, b"", b"Bearer wrong", b"right", b"Bearer ", b"bearer right"]
)
def test_a_request_without_the_key_is_refused(guard, path, value):
    headers = [] if value is None else [(b"authorization", value)]
    start, body = sent(guard, path, headers)
    assert start["status"] == 401
    assert b"Unauthorized" in body["body"]


def test_a_websocket_without_the_key_is_closed(guard):
    (message,) = sent(guard, "/v1/realtime", kind="websocket")
    assert message["type"] == "websocket.close"


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_health_checks_and_counters_need_no_key(guard, path):
    assert sent(guard, path) == ["answered"]


def test_a_server_whose_environment_lacks_the_key_does_not_start(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(KeyError):
        KeyGuard(None)
