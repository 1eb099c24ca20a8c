"""Replies in the format of SGLang 0.5.23: outputs, errors, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from _sglang_request import Request
from aiohttp import web

Body = Mapping[str, Any]


def output(body: Body, request: Request, text: str | None, version: str) -> dict[str, Any]:
    """Return the whole output so far; ``version`` is the label of the weights in use."""
    reply: dict[str, Any] = {} if text is None else {"text": text}
    return reply | {
        "output_ids": list(request.output_ids),
        "meta_info": _meta_info(request, version) | _logprobs(body, request),
    }


def since(whole: dict[str, Any], sent: dict[str, Any] | None) -> dict[str, Any]:
    """Return what is new in an output since the one that was sent before; totals stay totals."""
    if sent is None:
        return whole
    start, meta = len(sent["output_ids"]), dict(whole["meta_info"])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = meta["output_token_logprobs"][start:]
    news = whole | {"output_ids": whole["output_ids"][start:], "meta_info": meta}
    return news | ({"text": whole["text"][len(sent["text"]) :]} if "text" in whole else {})


def _meta_info(request: Request, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": len(request.prompt_ids),
        "completion_tokens": len(request.output_ids),
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": request.num_retractions,
        "weight_version": version,
    }
    if request.finish_reason:
        spans = request.version_spans or [{"version": version, "start": 0, "end": 0}]
        meta |= {"weight_versions": spans, "weight_version": spans[-1]["version"]}
    return meta


def _logprobs(body: Body, request: Request) -> dict[str, Any]:
    if not body.get("return_logprob"):
        return {}
    prompt_ids = request.prompt_ids[len(request.prompt_ids) - len(request.prompt_logprobs) :]
    return {
        "input_token_logprobs": _entries(request.prompt_logprobs, prompt_ids),
        "output_token_logprobs": _entries(request.logprobs, request.output_ids),
        "output_token_logprobs_length": len(request.logprobs),
    }


def _entries(logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[list[Any]]:
    """Return [logprob, token id, text] of each token; this server leaves the text out."""
    pairs = zip(logprobs, token_ids, strict=True)
    return [[logprob, token_id, None] for logprob, token_id in pairs]


def error(message: str, status: int = 400) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def unknown_field(message: str) -> web.Response:
    """The error for an unknown sampling parameter, which is not an object in SGLang."""
    return web.json_response({"error": message}, status=400)


def malformed(message: str) -> web.Response:
    kind = {"object": "error", "type": "Bad Request", "param": None, "code": 400}
    return web.json_response(kind | {"message": message}, status=400)


async def event_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    return response


async def send_event(response: web.StreamResponse, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    await response.write(f"data: {text}\n\n".encode())


async def refuse(http: web.Request, message: str, *, is_stream: bool) -> web.StreamResponse:
    """The error for a request that cannot be served; the status of a stream is 200 anyway."""
    if not is_stream:
        return error(message)
    response = await event_stream(http)
    kind = {"type": "invalid_request_error", "code": 400, "retryable": False}
    await send_event(response, {"error": {"message": message} | kind})
    await send_event(response, "[DONE]")
    return response
