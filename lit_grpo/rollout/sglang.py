"""Rollouts by SGLang servers: the engine, and SGLang's own way with commands, paths and fields.

Source: SGLang's native API, checked against release 0.5.23.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import Request, Sample
from lit_grpo.rollout.server.api import NEWS_TOKENS, Launch, Model, ServerAPI, token_versions
from lit_grpo.rollout.server.endpoint import (
    Endpoint,
    RequestRefused,
    ServerError,
    field,
    understanding,
)
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import UserError


class SGLangEngine(ServedEngine):
    """Rollouts by one or several SGLang servers over HTTP, launched here or attached to.

    Servers that are attached to need ``--enable-deterministic-inference``, without which seeds
    count for nothing, and for adapters ``--enable-lora``, ``--max-lora-rank`` and
    ``--lora-target-modules``; ``--incremental-streaming-output`` saves them work. Where speed is
    worth more than completions that can be drawn again, set ``launch.flags`` to
    ``{enable-deterministic-inference: false}``.

    Args:
        **engine: As for `ServedEngine`.
    """

    def __init__(self, **engine: Any) -> None:
        super().__init__(SGLangAPI(), **engine)


class SGLangAPI(ServerAPI):
    """Talks to ``python -m sglang.launch_server``. The samples of one request would share their
    noise: each has a request of its own."""

    needs = (
        "--enable-deterministic-inference, for adapters --enable-lora, --max-lora-rank and "
        "--lora-target-modules"
    )

    def command(self, launch: Launch, model: Model, port: int) -> list[str]:
        adapters = {}
        if model.adapter_rank is not None:
            _check_one_copy(launch)
            adapters = {
                "enable-lora": True,
                "max-lora-rank": model.adapter_rank,
                "lora-target-modules": model.adapter_modules,
            }
        options = {
            "model-path": model.path,
            "tokenizer-path": model.tokenizer,
            "host": launch.host,
            "port": port,
            "dtype": launch.dtype or model.dtype,
            "context-length": launch.max_model_len,
            "mem-fraction-static": launch.memory_fraction,
            "tensor-parallel-size": launch.tensor_parallel_size,
            "data-parallel-size": launch.data_parallel_size,
            "random-seed": 0,
            "enable-deterministic-inference": True,
            "incremental-streaming-output": True,
            "stream-interval": NEWS_TOKENS,
            "log-level-http": "warning",  # a line a request would fill the log
            **adapters,
        }
        return launch.command("sglang.launch_server", options)

    def env(self, launch: Launch) -> Mapping[str, str]:
        return {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # those under the temperature
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1",
        }

    def check(self, sampling: Sampling) -> None:
        if sampling.stop and sampling.min_tokens:
            raise UserError(
                f"min_tokens must be 0 where there are stop strings, got {sampling.min_tokens} "
                "(SGLang ends a completion at a stop string among its first tokens all the same). "
                "Set model.sampling.min_tokens to 0, or model.sampling.stop_token_ids in place of "
                "model.sampling.stop."
            )

    async def recover(self, endpoint: Endpoint, seconds: float) -> None:
        """What runs in a pause may go on with half of its weights changed: it is aborted."""
        await endpoint.call("POST", "/abort_request", {"abort_all": True}, seconds=seconds)
        await endpoint.call("POST", "/continue_generation", {}, seconds=seconds)

    async def check_health(self, endpoint: Endpoint, seconds: float) -> None:
        await endpoint.call("GET", "/health", seconds=seconds)

    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        info = await endpoint.call("GET", "/model_info", seconds=seconds)
        return str(field(info, "weight_version"))

    async def stream(
        self, endpoint: Endpoint, request: Request
    ) -> AsyncGenerator[tuple[int, Sample]]:
        (number,) = request.seeds
        sample = Sample()
        async with aclosing(endpoint.events("/generate", _body(request))) as events:
            async for event in events:
                with understanding(event):
                    _grow(sample, event, request)
                yield number, sample
        if sample.finish_reason is None:
            raise ServerError("the stream ended before its completion did")

    async def update(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        if update.is_adapter:
            await self._load_adapter(endpoint, update, seconds)
            return
        # What runs gives its keys and values up, and gets new ones by the new weights.
        await endpoint.call("POST", "/pause_generation", {"mode": "retract"}, seconds=seconds)
        weights = {
            "model_path": str(update.path),
            "weight_version": str(update.version),
            "flush_cache": False,  # it would be flushed before the label moves
        }
        reply = await endpoint.call("POST", "/update_weights_from_disk", weights, seconds=seconds)
        if not field(reply, "success"):
            raise ServerError(f"its weights could not be updated: {field(reply, 'message')}")
        await endpoint.call("POST", "/flush_cache", seconds=seconds)
        await endpoint.call("POST", "/continue_generation", {}, seconds=seconds)

    async def _load_adapter(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        with suppress(
            RequestRefused
        ):  # an attempt that broke off, or an earlier run, may have left one
            await self.forget(endpoint, update, seconds)
        adapter = {"lora_name": update.name, "lora_path": str(update.path)}
        await endpoint.call("POST", "/load_lora_adapter", adapter, seconds=seconds)
        label = {"new_version": str(update.version), "abort_all_requests": False}
        await endpoint.call("POST", "/update_weight_version", label, seconds=seconds)

    async def forget(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        name = {"lora_name": update.name}
        await endpoint.call("POST", "/unload_lora_adapter", name, seconds=seconds)


def _check_one_copy(launch: Launch) -> None:
    if launch.data_parallel_size > 1:
        raise UserError(
            f"data_parallel_size must be 1 where adapters are sent, got "
            f"{launch.data_parallel_size} (SGLang loads none beside copies). Set "
            "model.engine.init_args.launch.num_servers to the number of copies, or "
            "model.engine.init_args.weight_sync to full."
        )


def _body(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    (seed,) = request.seeds.values()
    return {
        "input_ids": request.token_ids,
        "lora_path": request.adapter.name if request.adapter else None,
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "sampling_seed": seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": request.stop_token_ids,
        },
    }


def _grow(sample: Sample, event: Mapping[str, Any], request: Request) -> None:
    meta = event["meta_info"]
    reason = meta["finish_reason"] and meta["finish_reason"]["type"]
    if reason not in (None, "stop", "length"):
        raise ServerError(f"a completion ended with {meta['finish_reason']}")
    # An event has the new tokens or, without incremental streaming, all of them.
    start = meta["completion_tokens"] - len(event["output_ids"])
    sample.token_ids[start:] = event["output_ids"]
    sample.logprobs[start:] = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    if reason is None:
        return
    sample.finish_reason = reason
    spans = meta["weight_versions"] if not request.adapter else ()
    sample.versions = token_versions(spans, len(sample.token_ids), request.adapter)
