"""The HTTP API of the test server: SGLang 0.5.23's native routes, and the faults of a test.

Replies have SGLang's format. What it does on a GPU only (memory, dtypes) is left out.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import _sglang_replies as replies
from _sglang_faults import Faults, Log
from _sglang_model import Engine
from _sglang_replies import Body
from _sglang_request import Request, SamplingParams
from aiohttp import web

OPEN_PATHS = ("/health", "/ready", "/metrics", "/test/")
"""Beginnings of the paths that need no API key: SGLang's, and those of the tests."""


class Server:
    """The routes of the server; ``flags`` are the parsed command line."""

    def __init__(self, flags: argparse.Namespace) -> None:
        sizes = flags.max_lora_rank and flags.lora_target_modules
        assert not flags.enable_lora or flags.lora_paths or sizes, (
            "--enable-lora needs --lora-paths, or --max-lora-rank and --lora-target-modules"
        )
        flags.enable_lora |= bool(flags.lora_paths)
        self.flags = flags
        self.engine = Engine(flags)
        self.faults = Faults()
        self.log = Log()
        self._transports: WeakSet[Any] = WeakSet()
        for name, _, path in (one.partition("=") for one in flags.lora_paths):
            self.engine.load_adapter(name, path)

    def app(self) -> web.Application:
        routes = {
            "/ready": self.ready,
            "/health": self.health,
            "/health_generate": self.health,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weight_version": self.update_weight_version,
            "/load_lora_adapter": self.load_lora_adapter,
            "/unload_lora_adapter": self.unload_lora_adapter,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release_memory_occupation,
            "/resume_memory_occupation": self.resume_memory_occupation,
            "/test/faults": self.set_faults,
            "/test/log": self.read_log,
            "/test/reset_count": self.reset_count,
        }
        app = web.Application(
            middlewares=[self._count, self._authenticate], client_max_size=1 << 30
        )
        for path, handler in routes.items():
            app.router.add_route("*", path, handler)
        return app

    @web.middleware
    async def _count(self, http: web.Request, handler: Any) -> web.StreamResponse:
        if not http.path.startswith("/test/"):
            self.log.requests[http.path] += 1
            self.log.connections += http.transport not in self._transports
            self._transports.add(http.transport)
        return await handler(http)

    @web.middleware
    async def _authenticate(self, http: web.Request, handler: Any) -> web.StreamResponse:
        key = self.flags.api_key
        is_open = not key or http.path.startswith(OPEN_PATHS) or http.method == "OPTIONS"
        if not is_open and http.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(http)

    async def ready(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.is_paused else 200)

    async def health(self, http: web.Request) -> web.Response:
        """Answer at once; SGLang generates a token first, and answers 503 in a pause after 20 s."""
        is_ill = self.flags.never_healthy or self.faults.strikes("unhealthy_checks")
        return web.Response(status=503 if is_ill or self.engine.is_paused else 200)

    async def model_info(self, http: web.Request) -> web.Response:
        config = self.engine.model.config
        return web.json_response(
            {
                "model_path": self.engine.model_path,
                "served_model_name": self.flags.served_model_name or self.flags.model_path,
                "tokenizer_path": self.flags.tokenizer_path or self.flags.model_path,
                "is_generation": True,
                "weight_version": self.faults.weight_version or self.engine.weight_version,
                "model_type": config["model_type"],
                "architectures": config["architectures"],
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        return web.json_response(vars(self.flags) | {"internal_states": [{}], "version": "0.5.23"})

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        with self._inside():
            if self.faults.generate_statuses:
                status = self.faults.generate_statuses.pop(0)
                return replies.error("a fault that the test asked for", status)
            if self.faults.strikes("hang_generate"):
                await asyncio.Event().wait()
            try:
                requests = self._requests(body)
            except TypeError as error:
                return replies.unknown_field(str(error))
            except ValueError as error:
                return await replies.refuse(http, str(error), is_stream=body.get("stream", False))
            answer = self._stream if body.get("stream") else self._answer
            return await answer(http, body, requests)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.log.generating += 1
        try:
            yield
        finally:
            self.log.generating -= 1

    def _requests(self, body: Body) -> list[Request]:
        """Return the sequences of a call, ``n`` per prompt, all with the same seed.

        They have the caller's id only if the call is for a single sequence.
        """
        params = SamplingParams(**body.get("sampling_params") or {})
        start = body.get("logprob_start_len", -1) if body.get("return_logprob") else -1
        requests = [
            Request(
                rid=body.get("rid") if not _is_batch(body) and body.get("rid") else uuid4().hex,
                prompt_ids=prompt_ids,
                params=params,
                adapter=body.get("lora_path"),
                logprob_start_len=start,
            )
            for prompt_ids in self._prompts(body)
            for _ in range(params.n)
        ]
        for request in requests:
            self.engine.check(request)
        return requests

    def _prompts(self, body: Body) -> list[list[int]]:
        given = body.get("input_ids") or body.get("text")
        if not given:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return [
            self.engine.tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in many
        ]

    async def _answer(self, http: web.Request, body: Body, requests: list[Request]) -> web.Response:
        cut = self._cutter(http)
        await asyncio.gather(*(self.engine.generate(one, partial(cut, one)) for one in requests))
        outputs = [self._output(body, request) for request in requests]
        return web.json_response(outputs if _is_batch(body) else outputs[0])

    async def _stream(
        self, http: web.Request, body: Body, requests: list[Request]
    ) -> web.StreamResponse:
        cut, response = self._cutter(http), await replies.event_stream(http)
        sent: dict[int, dict[str, Any]] = {}

        async def send(index: int, request: Request) -> None:
            await cut(request)
            whole = self._output(body, request) | ({"index": index} if _is_batch(body) else {})
            await replies.send_event(response, replies.since(whole, sent.get(index)))
            if self.flags.incremental_streaming_output:
                sent[index] = whole

        try:
            async with asyncio.TaskGroup() as group:
                for index, request in enumerate(requests):
                    send_one = partial(send, index, request)
                    group.create_task(self.engine.generate(request, send_one))
            await replies.send_event(response, "[DONE]")
        except* ConnectionError:
            """The client has disconnected, which has aborted its sequences."""
        return response

    def _cutter(self, http: web.Request) -> Callable[[Request], Awaitable[None]]:
        """Return what drops the connection of this call after two tokens, if the fault is set.

        aiohttp then cancels the handler, as it does when a client disconnects.
        """
        is_cut = self.faults.strikes("cut_generate")

        async def cut(request: Request) -> None:
            if is_cut and len(request.output_ids) >= 2 and http.transport:
                http.transport.abort()
                await asyncio.Event().wait()

        return cut

    def _output(self, body: Body, request: Request) -> dict[str, Any]:
        output = replies.output(
            body, request, self.engine.text(request), self.engine.weight_version
        )
        if self.faults.weight_version is not None:
            meta = output["meta_info"]
            meta["weight_version"] = self.faults.weight_version
            for span in meta.get("weight_versions", []):
                span["version"] = self.faults.weight_version
        return output

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await _json(http)
        self.engine.abort(body.get("rid") or "", is_all=body.get("abort_all", False))
        return web.Response()

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        body = await http.json()
        try:
            success, message = await self._update_from_disk(body)
        except Exception as error:
            success, message = False, f"Failed to update weights: {error}."
        content = {"success": success, "message": message, "num_paused_requests": 0}
        return web.json_response(content, status=200 if success else 400)

    async def _update_from_disk(self, body: Body) -> tuple[bool, str]:
        is_stale = await self._fault_of_update()

        def change() -> None:
            if not is_stale:
                self.engine.load_weights(body["model_path"])
            self.engine.weight_version = body.get("weight_version") or self.engine.weight_version

        if body.get("abort_all_requests"):
            self.engine.abort(is_all=True)
        await self.engine.update_weights(change)
        if body.get("flush_cache", True) and not self.engine.is_idle:
            return False, "Weights were updated, but the cache was not flushed."
        return True, "Succeeded to update model weights."

    async def _fault_of_update(self) -> bool:
        """Return whether the update should report success and change nothing."""
        if self.faults.strikes("hang_updates"):
            await asyncio.Event().wait()
        if self.faults.strikes("refuse_updates"):
            raise ValueError("a fault that the test asked for")
        return self.faults.strikes("stale_updates")

    async def update_weight_version(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.engine.abort(is_all=body.get("abort_all_requests", True))
        self.engine.weight_version = version = body["new_version"]
        message = f"Weight version updated to {version}"
        return web.json_response({"success": True, "message": message, "new_version": version})

    async def load_lora_adapter(self, http: web.Request) -> web.Response:
        body = await http.json()

        async def load() -> None:
            is_stale = await self._fault_of_update()
            self.engine.load_adapter(body["lora_name"], body["lora_path"], is_stale=is_stale)

        return await self._change_adapters(load)

    async def unload_lora_adapter(self, http: web.Request) -> web.Response:
        name = (await http.json())["lora_name"]
        return await self._change_adapters(lambda: self.engine.unload_adapter(name))

    async def _change_adapters(self, change: Callable[[], Awaitable[None]]) -> web.Response:
        try:
            if not self.flags.enable_lora:
                raise ValueError("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            await change()
        except Exception as error:
            content = {"success": False, "error_message": str(error), "loaded_adapters": None}
            return web.json_response(content, status=400)
        content = {"success": True, "error_message": "", "loaded_adapters": self.engine.adapters}
        return web.json_response(content)

    async def pause_generation(self, http: web.Request) -> web.Response:
        mode = (await _json(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return replies.malformed(f"mode must be abort, retract or in_place, got {mode}")
        await self.engine.pause(mode)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        self.engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        if self.engine.is_idle:
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def release_memory_occupation(self, http: web.Request) -> web.Response:
        tags = (await _json(http)).get("tags") or ["kv_cache", "weights", "cuda_graph"]
        assert self.engine.is_idle, "only when server is idle"
        is_kept = not self.flags.enable_memory_saver or self.flags.enable_weights_cpu_backup
        if "weights" in tags and not is_kept:
            self.engine.model.lose_weights()
        return web.json_response(None)

    async def resume_memory_occupation(self, http: web.Request) -> web.Response:
        """Do nothing: lost weights do not come back."""
        return web.json_response(None)

    async def set_faults(self, http: web.Request) -> web.Response:
        self.faults = Faults(**await http.json())
        self.engine.token_delay_seconds = self.faults.token_delay_seconds
        self.engine.hold_after_tokens = self.faults.hold_after_tokens
        return web.json_response(asdict(self.faults))

    async def read_log(self, http: web.Request) -> web.Response:
        self.log.dropped = self.engine.num_dropped
        self.log.held = self.engine.num_held
        self.log.most_unfinished = self.engine.most_unfinished
        return web.json_response(vars(self.log))

    async def reset_count(self, http: web.Request) -> web.Response:
        """Reset ``most_unfinished``: a weight check may exceed the limit that a test is about."""
        self.engine.reset_count()
        return web.Response()


def _is_batch(body: Body) -> bool:
    """Return whether the reply is a list: for several prompts, or several samples of one."""
    given = body.get("input_ids") or body.get("text")
    is_list = isinstance(given, list) and not isinstance(given[0], int)
    return is_list or (body.get("sampling_params") or {}).get("n", 1) > 1


async def _json(http: web.Request) -> dict[str, Any]:
    """Return the body, which may be absent if every field has a default."""
    return await http.json() if http.can_read_body else {}
