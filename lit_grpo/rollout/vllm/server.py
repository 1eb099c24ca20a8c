"""Rollouts by vLLM servers: the engine, and the commands, paths and fields of vLLM's API.

Source: vLLM's RL endpoints, checked against release 0.32.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from lit_grpo.rollout.engine import SampledPolicy, Sampling
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
from lit_grpo.rollout.vllm import key_guard
from lit_grpo.rollout.vllm.nccl_transfer import NCCLTransfer, check_transfer
from lit_grpo.rollout.vllm.sampling import (
    LogprobsMode,
    check_sampling,
    max_adapter_rank,
    sampling_params,
)
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.rollout.weights.sync import sends_adapter
from lit_grpo.types.field_types import check_init

GUARD_MODULE = "lit_grpo_key_guard"
"""Name of the copy of `key_guard` that servers import."""
MAX_SEQUENCES = ("max-num-seqs", "max_num_seqs")
"""Spellings of the flag for how many samples a server runs at a time."""
NUM_ASKED = 8
"""Tokens that tell which logprobs a server reports."""
CERTAIN_LOGPROB = -1e-3


class VLLMServerEngine(ServedEngine):
    """Rollouts by one or several vLLM servers over HTTP, launched here or already running.

    Servers in ``urls`` must be started with ``VLLM_SERVER_DEV_MODE=1``,
    ``--enable-scale-out``, ``--served-model-name policy`` and the same ``--logprobs-mode``; for
    adapters also with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, ``--enable-lora``,
    ``--max-lora-rank`` and ``--max-loras 2``; for a transfer by NCCL with
    ``--weight-transfer-config '{"backend": "nccl"}'``; and with ``--api-server-count 1`` if they
    have a ``--data-parallel-size``.

    Args:
        logprobs_mode: Which logprobs vLLM reports. ``processed_logprobs`` are those at the
            temperature, which training needs. ``raw_logprobs`` ignore it, so they are correct
            only at temperature 1; there they allow top-p and top-k.
        weight_transfer: How full weights are sent. ``disk`` writes them to ``directory``. ``nccl``
            keeps a copy in rank 0's host memory and sends it from GPU to GPU; vLLM must also
            be installed in the trainer's environment, and the servers need their own GPUs
            (`VLLMEngine` shares the trainer's).
        **engine: As for `ServedEngine`.
    """

    def __init__(
        self,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        weight_transfer: Literal["disk", "nccl"] = "disk",
        **engine: Any,
    ) -> None:
        check_init("model.engine.init_args", VLLMServerEngine, locals())
        transfer = NCCLTransfer() if weight_transfer == "nccl" else None
        super().__init__(VLLMAPI(logprobs_mode, transfer), **engine)
        self.weight_transfer = weight_transfer
        flags = (self.launch and self.launch.flags) or {}
        # vLLM refuses a request for more samples than it runs at a time.
        limits = (flags.get(name) for name in MAX_SEQUENCES)
        self.max_group_size = next((one for one in limits if isinstance(one, int)), None)

    def start(self, policy: SampledPolicy) -> None:
        if self.weight_transfer == "nccl":
            check_transfer(is_adapter_sent=sends_adapter(policy.model, self.weight_sync))
        super().start(policy)


class VLLMAPI(ServerAPI):
    """Talk to ``vllm serve``.

    Args:
        transfer: Sends full weights; None if the server reads them from files.
    """

    package = "vllm"
    requirements = (
        "VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-scale-out; for "
        "adapters also --enable-lora, --max-lora-rank and --max-loras 2"
    )
    batches_samples = True
    env: Mapping[str, str] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def __init__(self, logprobs_mode: LogprobsMode, transfer: NCCLTransfer | None = None) -> None:
        self.logprobs_mode = logprobs_mode
        self.reads_files = transfer is None
        self._transfer = transfer
        if logprobs_mode == "raw_logprobs":
            self.check_temperature = 1.0

    def command(self, launch: Launch, model: ServedModel, port: int) -> list[str]:
        adapters = {}
        if model.adapter_rank is not None:
            # Two adapters at a time: running requests continue with the previous one.
            max_rank = max_adapter_rank(model.adapter_rank)
            adapters = {"enable-lora": True, "max-lora-rank": max_rank, "max-loras": 2}
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
            "uvicorn-log-level": "warning",  # otherwise the log has a line per request
            **adapters,
        }
        # Not the program `vllm`, which is broken in the builds for CPUs.
        return launch.command("vllm.entrypoints.openai.api_server", options)

    def guard(self, api_key: str, directory: Path) -> Guard:
        """Add a middleware that guards every endpoint; vLLM's own check omits weight updates."""
        write_private(directory / f"{GUARD_MODULE}.py", Path(key_guard.__file__).read_text())
        return Guard(
            api_key=api_key,
            flags={"middleware": f"{GUARD_MODULE}.{key_guard.KeyGuard.__name__}"},
            env={"VLLM_API_KEY": api_key},
            modules=directory,
        )

    def check_sampling(self, sampling: Sampling) -> None:
        check_sampling(sampling, self.logprobs_mode)

    async def recover(self, endpoint: Endpoint, seconds: float) -> None:
        await endpoint.call("POST", "/resume", seconds=seconds)

    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        info = await endpoint.call("GET", "/weight_info", seconds=seconds)
        return str(require_field(info, "weight_version"))

    async def read_logprobs_mode(self, endpoint: Endpoint) -> LogprobsMode:
        """Return which logprobs the server reports, from a few tokens that it samples.

        With a single candidate for each token processed logprobs are 0. So are raw logprobs of a
        model that is certain, which then count as processed ones.
        """
        sampling = Sampling(top_k=1, max_tokens=NUM_ASKED)
        request = Request(token_ids=(1,), sampling=sampling, stop_token_ids=(), seeds={0: 0})
        lowest = 0.0
        async with aclosing(self.stream(endpoint, request)) as samples:
            async for _, sample in samples:
                lowest = min(lowest, *sample.logprobs)
        return "raw_logprobs" if lowest < CERTAIN_LOGPROB else "processed_logprobs"

    async def stream(
        self, endpoint: Endpoint, request: Request
    ) -> AsyncGenerator[tuple[int, Sample]]:
        """Send one request for all samples; vLLM seeds sample j with ``seed + j``."""
        samples = {index: Sample() for index in request.seeds}
        indices = list(samples)
        async with _events(endpoint, request) as events:
            async for event in events:
                with reading(event):
                    grown = [indices[choice["index"]] for choice in event["choices"]]
                    for index, choice in zip(grown, event["choices"], strict=True):
                        _grow(samples[index], choice, request.adapter)
                for index in grown:
                    yield index, samples[index]
        if any(sample.finish_reason is None for sample in samples.values()):
            raise ServerError("the stream ended before its completions did")

    async def update_weights(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        if update.is_adapter:
            with suppress(RequestRefused):  # refused unless an earlier attempt or run left one
                await self.unload_adapter(endpoint, update, seconds)
            adapter = {"lora_name": update.name, "lora_path": str(update.path)}
            await endpoint.call("POST", "/v1/load_lora_adapter", adapter, seconds=seconds)
            await self._label(endpoint, update, seconds)
            return
        await endpoint.call("POST", "/pause", seconds=seconds, mode="keep")
        await self._replace_weights(endpoint, update, seconds)
        # Also for running requests: their keys and values come from the old weights.
        reset = await endpoint.call(
            "POST", "/reset_prefix_cache", seconds=seconds, reset_running_requests="true"
        )
        if not require_field(reset, "success"):
            raise ServerError("its prefix cache could not be reset after a weight update")
        await self._label(endpoint, update, seconds)
        await endpoint.call("POST", "/resume", seconds=seconds)

    async def _replace_weights(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        if self._transfer is not None and update.host_weights is not None:
            await self._transfer.send(endpoint, update.host_weights, seconds)
            return
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(update.path)}}
        await endpoint.call("POST", "/collective_rpc", reload, seconds=seconds)

    async def _label(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        label = {"new_version": str(update.version)}
        await endpoint.call("POST", "/update_weight_version", label, seconds=seconds)

    async def unload_adapter(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        name = {"lora_name": update.name}
        await endpoint.call("POST", "/v1/unload_lora_adapter", name, seconds=seconds)


@asynccontextmanager
async def _events(endpoint: Endpoint, request: Request) -> AsyncGenerator[AsyncGenerator[Any]]:
    """Send a request; if vLLM refuses it because of a server setting, say which to change."""
    try:
        async with aclosing(endpoint.events("/inference/v1/generate", _body(request))) as events:
            yield events
    except RequestRefused as error:
        if "max_num_seqs" not in str(error):
            raise
        raise RequestRefused(
            f"{error}. A group is one request: start the server with a --max-num-seqs of at least "
            "model.group_size, or lower model.group_size."
        ) from error


def _body(request: Request) -> dict[str, Any]:
    first_seed = min(request.seeds.values())
    params = sampling_params(request, num_samples=len(request.seeds), seed=first_seed)
    return {
        "model": request.adapter.name if request.adapter else "policy",
        "token_ids": request.token_ids,
        "stream": True,
        "sampling_params": params | {"stream_interval": STREAM_INTERVAL},
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
