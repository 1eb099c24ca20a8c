"""Rollouts by vLLM servers: the engine, and vLLM's own way with commands, paths and fields.

Source: vLLM's RL endpoints, checked against release 0.32.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Literal

from lit_grpo.rollout.engine import SampledPolicy, Sampling
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
from lit_grpo.rollout.vllm.nccl_transfer import NCCLTransfer, check_transfer
from lit_grpo.rollout.vllm.sampling import (
    LogprobsMode,
    adapter_room,
    check_sampling,
    sampling_params,
)
from lit_grpo.rollout.weights.files import sends_adapter
from lit_grpo.rollout.weights.store import WeightUpdate


class VLLMServerEngine(ServedEngine):
    """Rollouts by one or several vLLM servers over HTTP, launched here or attached to.

    Servers that are attached to need ``VLLM_SERVER_DEV_MODE=1``, ``--enable-scale-out``,
    ``--served-model-name policy`` and ``--logprobs-mode`` as given here; for adapters
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, ``--enable-lora``, ``--max-lora-rank`` and
    ``--max-loras 2``, too; for a transfer by NCCL
    ``--weight-transfer-config '{"backend": "nccl"}'``; with ``--data-parallel-size``
    ``--api-server-count 1``.

    Args:
        logprobs_mode: Which logprobs vLLM reports. ``processed_logprobs`` are under the
            temperature, which training needs. ``raw_logprobs`` are right at temperature 1 only,
            where they allow top-p and top-k.
        weight_transfer: How full weights travel. ``disk`` writes them to ``directory``. ``nccl``
            keeps a copy in rank 0's host memory and sends it from GPU to GPU; it needs vLLM in the
            trainer's environment, too, and GPUs of the servers' own (`VLLMEngine` shares one).
        **engine: As for `ServedEngine`.
    """

    def __init__(
        self,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        weight_transfer: Literal["disk", "nccl"] = "disk",
        **engine: Any,
    ) -> None:
        transfer = NCCLTransfer() if weight_transfer == "nccl" else None
        super().__init__(VLLMAPI(logprobs_mode, transfer), **engine)
        self.weight_transfer = weight_transfer

    def start(self, policy: SampledPolicy) -> None:
        if self.weight_transfer == "nccl":
            check_transfer(is_adapter_sent=sends_adapter(policy.model, self.weight_sync))
        super().start(policy)


class VLLMAPI(ServerAPI):
    """Talks to ``vllm serve``.

    Args:
        transfer: Brings full weights to it; None where it reads files.
    """

    needs = (
        "VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-scale-out, for "
        "adapters --enable-lora, --max-lora-rank and --max-loras 2"
    )
    shares_requests = True

    def __init__(self, logprobs_mode: LogprobsMode, transfer: NCCLTransfer | None = None) -> None:
        self.logprobs_mode = logprobs_mode
        self.reads_files = transfer is None
        self._transfer = transfer
        if logprobs_mode == "raw_logprobs":
            self.temperature_of_logprobs = 1.0

    def command(self, launch: Launch, model: Model, port: int) -> list[str]:
        adapters = {}
        if model.adapter_rank is not None:
            # Two at a time: what runs goes on with the one before.
            room = adapter_room(model.adapter_rank)
            adapters = {"enable-lora": True, "max-lora-rank": room, "max-loras": 2}
        options = {
            "model": model.path,
            "tokenizer": model.tokenizer,
            "served-model-name": "policy",
            "host": launch.host,
            "port": port,
            "dtype": launch.dtype or model.dtype,
            "max-model-len": launch.max_model_len,
            "gpu-memory-utilization": launch.memory_fraction,
            "tensor-parallel-size": launch.tensor_parallel_size,
            "data-parallel-size": launch.data_parallel_size,
            "logprobs-mode": self.logprobs_mode,
            "weight-transfer-config": None if self.reads_files else '{"backend": "nccl"}',
            "enable-scale-out": True,
            "uvicorn-log-level": "warning",  # a line a request would fill the log
            **adapters,
        }
        # Not the program `vllm`: builds for CPUs install it broken.
        return launch.command("vllm.entrypoints.openai.api_server", options)

    def env(self, launch: Launch) -> Mapping[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def check(self, sampling: Sampling) -> None:
        check_sampling(sampling, self.logprobs_mode)

    async def recover(self, endpoint: Endpoint, seconds: float) -> None:
        await endpoint.call("POST", "/resume", seconds=seconds)

    async def check_health(self, endpoint: Endpoint, seconds: float) -> None:
        await endpoint.call("GET", "/health", seconds=seconds)

    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        info = await endpoint.call("GET", "/weight_info", seconds=seconds)
        return str(field(info, "weight_version"))

    async def stream(
        self, endpoint: Endpoint, request: Request
    ) -> AsyncGenerator[tuple[int, Sample]]:
        """All samples of a prompt share one request: vLLM seeds sample j with ``seed + j``."""
        samples = {number: Sample() for number in request.seeds}
        numbers = list(samples)
        async with aclosing(endpoint.events("/inference/v1/generate", _body(request))) as events:
            async for event in events:
                with understanding(event):
                    grown = [numbers[choice["index"]] for choice in event["choices"]]
                    for number, choice in zip(grown, event["choices"], strict=True):
                        _grow(samples[number], choice, request.adapter)
                for number in grown:
                    yield number, samples[number]
        if any(sample.finish_reason is None for sample in samples.values()):
            raise ServerError("the stream ended before its completions did")

    async def update(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        if update.is_adapter:
            with suppress(RequestRefused):  # what broke off, or an earlier run, may have left one
                await self.forget(endpoint, update, seconds)
            adapter = {"lora_name": update.name, "lora_path": str(update.path)}
            await endpoint.call("POST", "/v1/load_lora_adapter", adapter, seconds=seconds)
            await self._label(endpoint, update, seconds)
            return
        await endpoint.call("POST", "/pause", seconds=seconds, mode="keep")
        await self._replace_weights(endpoint, update, seconds)
        # Also of what runs: its keys and values are the old weights'.
        reset = await endpoint.call(
            "POST", "/reset_prefix_cache", seconds=seconds, reset_running_requests="true"
        )
        if not field(reset, "success"):
            raise ServerError("its prefix cache could not be reset after a weight update")
        await self._label(endpoint, update, seconds)
        await endpoint.call("POST", "/resume", seconds=seconds)

    async def _replace_weights(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        if self._transfer is not None and update.weights is not None:
            await self._transfer.send(endpoint, update.weights, seconds)
            return
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.path)}}
        await endpoint.call("POST", "/collective_rpc", reload, seconds=seconds)

    async def _label(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        label = {"new_version": str(update.version)}
        await endpoint.call("POST", "/update_weight_version", label, seconds=seconds)

    async def forget(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        name = {"lora_name": update.name}
        await endpoint.call("POST", "/v1/unload_lora_adapter", name, seconds=seconds)


def _body(request: Request) -> dict[str, Any]:
    first_seed = min(request.seeds.values())
    params = sampling_params(request, num_samples=len(request.seeds), seed=first_seed)
    return {
        "model": request.adapter.name if request.adapter else "policy",
        "token_ids": request.token_ids,
        "stream": True,
        "sampling_params": params | {"stream_interval": NEWS_TOKENS},
    }


def _grow(sample: Sample, choice: Mapping[str, Any], adapter: WeightUpdate | None) -> None:
    sample.token_ids += choice["token_ids"]
    sample.logprobs += [token["logprob"] for token in choice["logprobs"]["content"]]
    if choice["finish_reason"] is None:
        return
    if choice["finish_reason"] not in ("stop", "length"):
        raise ServerError(f"a completion ended with {choice['finish_reason']!r}")
    sample.finish_reason = choice["finish_reason"]
    sample.versions = token_versions(choice["weight_versions"], len(sample.token_ids), adapter)
