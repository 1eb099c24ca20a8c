"""The differences between kinds of inference servers: commands, paths and fields of requests."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import Request, Sample
from lit_grpo.rollout.server.api_key import Guard
from lit_grpo.rollout.server.endpoint import Endpoint
from lit_grpo.rollout.weight_check import CHECK_TEMPERATURE
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Launch:
    """Inference servers that the engine starts, supervises and stops.

    Args:
        num_servers: Number of servers.
        python: Interpreter of the environment that has the server; null for the trainer's.
        program: Command that takes the server's options, instead of ``python -m`` and its module:
            a container, or a launcher such as ``["srun", "python", "-m", "sglang.launch_server"]``.
        host: Address to listen on, in a private network if processes on other machines need it.
        port: Port of the first server; the others use the following ones. Null for free ports.
        devices: ``CUDA_VISIBLE_DEVICES`` of each server, such as ``["0", "1"]`` or ``["0,1"]``.
        memory_fraction: Share of each GPU's memory for weights and key-value cache; null for the
            server's default.
        tensor_parallel_size: GPUs that share one copy of the weights.
        data_parallel_size: Copies of the weights behind one address.
        dtype: Data type of the server's weights; null for bfloat16 if trainer.precision is
            bf16-mixed, otherwise the policy's.
        max_model_len: Longest prompt and completion together, in tokens; null for the model's.
        flags: Further options of the server by name, such as ``{max-num-seqs: 64}``; true for a
            flag without a value.
        env: Further environment variables.

    Raises:
        UserError: a value is out of range, or ``devices`` does not match ``num_servers``.
    """

    num_servers: int = 1
    python: str | None = None
    program: list[str] | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    devices: list[str] | None = None
    memory_fraction: float | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_model_len: int | None = None
    flags: dict[str, Any] | None = None
    env: dict[str, str] | None = None

    def __post_init__(self) -> None:
        key = "model.engine.init_args.launch"
        check_fields(key, self)
        for name in ("num_servers", "tensor_parallel_size", "data_parallel_size"):
            check_range(f"{key}.{name}", getattr(self, name), at_least=1)
        check_range(f"{key}.port", self.port, at_least=1, why="null chooses a free one")
        if self.devices is not None and len(self.devices) != self.num_servers:
            raise setting_error(
                f"{key}.devices",
                f"{self.num_servers} strings, one for each server",
                self.devices,
                "each names the GPUs of a server, such as '0,1'",
            )

        if any(name.replace("_", "-").endswith("api-key") for name in self.flags or {}):
            # The value is not shown, since it is a key.
            raise UserError(
                "launch.flags must not contain an API key (every user of the machine can read a "
                "command line, and it would be saved with the config). Remove it: the run makes a "
                "key of its own. To choose the key, set model.engine.init_args.api_key_variable."
            )

    def command(self, module: str, options: Mapping[str, Any]) -> list[str]:
        """Return the command line of a server's module; ``flags`` override the options."""
        program = self.program or [self.python or sys.executable, "-m", module]
        return program + as_flags({**options, **(self.flags or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a server is started with."""

    path: str
    """Directory or hub id."""
    tokenizer: str
    """Directory; the tokenizer may differ from the one next to the weights."""
    dtype: str
    adapter_rank: int | None
    """Largest rank of the adapters that will be sent to it; None if full weights are sent."""
    adapter_modules: tuple[str, ...] = ()
    """Names of the layers that the adapters change."""


class ServerAPI(ABC):
    """How to talk to one kind of server.

    Every coroutine may raise ``RequestRefused`` or ``ServerError``.
    """

    requirements: str
    """Options that an externally started server must have been started with."""

    package: str = ""
    """The Python package that has the server; empty if it is not known."""

    reads_files = True
    """Whether it reads full weights from files; otherwise they are sent from host memory."""

    batches_samples = False
    """Whether one request can ask for several samples, each with its own seed."""

    check_temperature: float = CHECK_TEMPERATURE
    """Temperature at which its logprobs are compared with the trainer's."""

    env: Mapping[str, str] = {}
    """Environment variables that a launched server needs."""

    @abstractmethod
    def command(self, launch: Launch, model: ServedModel, port: int) -> list[str]:
        """Return the command line that starts a server."""

    @abstractmethod
    def guard(self, api_key: str, directory: Path) -> Guard:
        """Return the settings that make a launched server require the key.

        Args:
            directory: Where files for the server may be written, as private ones.
        """

    @abstractmethod
    def check_sampling(self, sampling: Sampling) -> None:
        """Check that the server supports these sampling parameters exactly.

        Raises:
            UserError: it does not; the message says why, and what to set.
        """

    async def recover(  # noqa: B027 - optional
        self, endpoint: Endpoint, seconds: float
    ) -> None:
        """Undo what an interrupted weight update left behind, such as a pause."""

    async def check_health(self, endpoint: Endpoint, seconds: float) -> None:
        """Raise an error unless the server reports that it is healthy."""
        await endpoint.call("GET", "/health", seconds=seconds)

    @abstractmethod
    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        """Return the label of the server's weights."""

    def split(self, request: Request) -> list[Request]:
        """Split a request into requests that ``stream`` accepts."""
        together = self.batches_samples and not request.sampling.is_greedy
        runs: list[dict[int, int]] = []
        for index, seed in sorted(request.seeds.items()):
            if not (together and runs and max(runs[-1].values()) == seed - 1):
                runs.append({})
            runs[-1][index] = seed
        return [replace(request, seeds=run) for run in runs]

    @abstractmethod
    def stream(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[tuple[int, Sample]]:
        """Yield (index of a sample, the sample so far) whenever one has new tokens.

        Args:
            request: One of the requests that ``split`` returned, so its seeds are consecutive.
        """

    @abstractmethod
    async def update_weights(
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        """Make the server sample with new weights; running requests continue with them."""

    async def unload_adapter(  # noqa: B027 - optional
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        """Unload an adapter that is no longer used by any request."""


def token_versions(
    spans: Sequence[Mapping[str, Any]], num_tokens: int, adapter: WeightUpdate | None
) -> list[str]:
    """Return the label of the weights that sampled each token.

    Args:
        spans: Where each label of the server's weights starts and ends.
        adapter: If given, its version is the label of every token: its weights never change.
    """
    if adapter:
        return [str(adapter.version)] * num_tokens
    return [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Return command-line options.

    None and False omit the option, True writes the bare flag, a list writes several values, and a
    mapping is written as JSON.
    """
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            words += [f"--{name}", *map(_as_word, values)]
    return words


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
