"""Rollouts by SGLang servers: the engine, and the commands, paths and fields of SGLang's API.

Source: SGLang's native API, checked against release 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import STREAM_INTERVAL, Request, Sample
from lit_grpo.rollout.server.api import (
    Launch,
    ServedModel,
    ServerAPI,
    token_versions,
)
from lit_grpo.rollout.server.api_key import Guard, write_private
from lit_grpo.rollout.server.endpoint import (
    Endpoint,
    RequestRefused,
    ServerError,
    reading,
    require_field,
)
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import UserError, setting_error


class SGLangEngine(ServedEngine):
    """Rollouts by one or several SGLang servers over HTTP, launched here or already running.

    Servers in ``urls`` must be started with ``--enable-deterministic-inference``, without
    which seeds have no effect, and for adapters with ``--enable-lora``, ``--max-lora-rank`` and
    ``--lora-target-modules``; ``--incremental-streaming-output`` saves them work. If speed matters
    more than reproducible completions, set ``launch.flags`` to
    ``{enable-deterministic-inference: false}``.

    Args:
        **engine: As for `ServedEngine`.
    """

    def __init__(self, **engine: Any) -> None:
        super().__init__(SGLangAPI(), **engine)


class SGLangAPI(ServerAPI):
    """Talk to ``python -m sglang.launch_server``.

    Each sample is requested separately, because all samples of a request have the same seed.
    """

    package = "sglang"
    requirements = (
        "--enable-deterministic-inference; for adapters also --enable-lora, --max-lora-rank and "
        "--lora-target-modules"
    )
    env: Mapping[str, str] = {
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # report logprobs at the temperature
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1",
    }

    def command(self, launch: Launch, model: ServedModel, port: int) -> list[str]:
        adapters = {}
        if model.adapter_rank is not None:
            _check_data_parallel(launch)
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
            "stream-interval": STREAM_INTERVAL,
            "log-level-http": "warning",  # otherwise the log has a line per request
            **adapters,
        }
        return launch.command("sglang.launch_server", options)

    def guard(self, api_key: str, directory: Path) -> Guard:
        """Name the key in a file of options: SGLang reads it from there or from the command line.

        SGLang then answers only health checks and counters without the key.
        """
        options = directory / "options.yaml"
        write_private(options, json.dumps({"api-key": api_key}))
        return Guard(api_key=api_key, flags={"config": str(options)}, env={})

    def check_sampling(self, sampling: Sampling) -> None:
        if sampling.stop and sampling.min_tokens:
            raise UserError(
                f"min_tokens must be 0 together with stop strings, got {sampling.min_tokens} "
                "(SGLang ignores min_tokens at a stop string). Set model.sampling.min_tokens to "
                "0, or use model.sampling.stop_token_ids instead of model.sampling.stop."
            )

    async def recover(self, endpoint: Endpoint, seconds: float) -> None:
        """Abort running requests, since half of the weights may have changed, and end a pause."""
        await endpoint.call("POST", "/abort_request", {"abort_all": True}, seconds=seconds)
        await endpoint.call("POST", "/continue_generation", {}, seconds=seconds)

    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        info = await endpoint.call("GET", "/model_info", seconds=seconds)
        return str(require_field(info, "weight_version"))

    async def stream(
        self, endpoint: Endpoint, request: Request
    ) -> AsyncGenerator[tuple[int, Sample]]:
        (index,) = request.seeds
        sample = Sample()
        async with aclosing(endpoint.events("/generate", _body(request))) as events:
            async for event in events:
                with reading(event):
                    _grow(sample, event, request)
                yield index, sample
        if sample.finish_reason is None:
            raise ServerError("the stream ended before its completion did")

    async def update_weights(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        if update.is_adapter:
            await self._load_adapter(endpoint, update, seconds)
            return
        # Running requests drop their keys and values, and recompute them with the new weights.
        await endpoint.call("POST", "/pause_generation", {"mode": "retract"}, seconds=seconds)
        weights = {
            "model_path": str(update.path),
            "weight_version": str(update.version),
            "flush_cache": False,  # that would flush it before the label changes
        }
        reply = await endpoint.call("POST", "/update_weights_from_disk", weights, seconds=seconds)
        if not require_field(reply, "success"):
            message = require_field(reply, "message")
            raise ServerError(f"its weights could not be updated: {message}")
        await endpoint.call("POST", "/flush_cache", seconds=seconds)
        await endpoint.call("POST", "/continue_generation", {}, seconds=seconds)

    async def _load_adapter(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        with suppress(RequestRefused):  # refused unless an earlier attempt or run left one
            await self.unload_adapter(endpoint, update, seconds)
        adapter = {"lora_name": update.name, "lora_path": str(update.path)}
        await endpoint.call("POST", "/load_lora_adapter", adapter, seconds=seconds)
        label = {"new_version": str(update.version), "abort_all_requests": False}
        await endpoint.call("POST", "/update_weight_version", label, seconds=seconds)

    async def unload_adapter(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        name = {"lora_name": update.name}
        await endpoint.call("POST", "/unload_lora_adapter", name, seconds=seconds)


def _check_data_parallel(launch: Launch) -> None:
    if launch.data_parallel_size > 1:
        raise setting_error(
            "model.engine.init_args.launch.data_parallel_size",
            "1 if adapters are sent",
            launch.data_parallel_size,
            "SGLang loads adapters into one copy only: launch several servers with "
            "launch.num_servers, or set weight_sync to full",
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
    # An event has the new tokens only or, without incremental streaming, all of them.
    start = meta["completion_tokens"] - len(event["output_ids"])
    sample.token_ids[start:] = event["output_ids"]
    sample.logprobs[start:] = [logprob for logprob, *_ in meta["output_token_logprobs"]]
    if reason is None:
        return
    sample.finish_reason = reason
    spans = meta["weight_versions"] if not request.adapter else ()
    sample.versions = token_versions(spans, len(sample.token_ids), request.adapter)
