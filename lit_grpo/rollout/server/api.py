"""What the kinds of inference servers differ in: commands, paths, fields. Waits and retries for
nothing.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_grpo.rollout.engine import Sampling
from lit_grpo.rollout.requests import Request, Sample
from lit_grpo.rollout.server.endpoint import Endpoint
from lit_grpo.rollout.weights.store import WeightUpdate
from lit_grpo.types import UserError

NEWS_TOKENS = 64
"""A streamed completion says so often that it is alive."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Servers that an engine starts itself, watches and ends.

    Args:
        num_servers: How many.
        python: Interpreter of the environment that has the server; this one when null.
        program: What takes the server's options in place of ``python -m`` and its module: a
            container, or a launcher such as ``["srun", "python", "-m", "sglang.launch_server"]``.
        host: Address that they listen on. Whoever reaches it can have them execute code.
        port: Of the first server, the others have the next ones; free ones when null.
        devices: ``CUDA_VISIBLE_DEVICES`` of each server, such as ``["0", "1"]`` or ``["0,1"]``.
        memory_fraction: Of each GPU's memory for weights and key-value cache; the server's own
            default when null.
        tensor_parallel_size: GPUs that share one copy of the weights.
        data_parallel_size: Copies of the weights behind one address.
        dtype: Of the server's weights; the policy's when null.
        max_model_len: Longest prompt and completion together, in tokens; the model's when null.
        flags: Further options of the server by name, such as ``{max-num-seqs: 64}``; true stands
            for a flag without a value.
        env: Further environment variables.

    Raises:
        ValueError: a number below its least, or other numbers of servers and devices.
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
        for name in ("num_servers", "tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise UserError(f"launch.{name} must be >= 1, got {getattr(self, name)}.")
        if self.port == 0:
            raise UserError("launch.port must be >= 1, or null for a free one, got 0.")
        if self.devices is not None and len(self.devices) != self.num_servers:
            raise UserError(
                f"launch.devices must name the GPUs of each of the {self.num_servers} servers, got "
                f"{self.devices} (one string a server, such as '0,1')."
            )

    def command(self, module: str, options: Mapping[str, Any]) -> list[str]:
        """The command line of a server's module; the user's flags win over the given options."""
        program = self.program or [self.python or sys.executable, "-m", module]
        return program + as_flags({**options, **(self.flags or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a server is started with."""

    path: str
    """Directory or hub id."""
    tokenizer: str
    """Directory: it need not be the model's own."""
    dtype: str
    adapter_rank: int | None
    """Largest rank of the adapters that it will be given; None when it gets full weights."""
    adapter_modules: tuple[str, ...] = ()
    """Names of the layers that they change."""


class ServerAPI(ABC):
    """How to talk to one kind of server.

    Every request may raise ``RequestRefused`` or ``ServerError``.
    """

    needs: str
    """What a server that is attached to must have been started with."""

    reads_files = True
    """Whether full weights come to it in files, not from the trainer's memory."""

    shares_requests = False
    """Whether one request can have several samples, each with noise of its own."""

    temperature_of_logprobs: float = 0.7
    """At which its logprobs are compared with the trainer's; another one than 1 tells whether it
    honours temperatures."""

    @abstractmethod
    def command(self, launch: Launch, model: Model, port: int) -> list[str]:
        """The command line that starts a server."""

    def env(self, launch: Launch) -> Mapping[str, str]:
        """Variables that it needs."""
        return {}

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Refuse what the server would do otherwise than asked.

        Raises:
            ValueError: what, why and what to set.
        """

    async def recover(  # noqa: B027 - where nothing stays behind there is nothing to end
        self, endpoint: Endpoint, seconds: float
    ) -> None:
        """End what a weight update that broke off has left, such as a pause, and what runs."""

    @abstractmethod
    async def check_health(self, endpoint: Endpoint, seconds: float) -> None:
        """Returns when the server says that it is well."""

    @abstractmethod
    async def read_version(self, endpoint: Endpoint, seconds: float) -> str:
        """Label of the weights that it holds."""

    def parts(self, request: Request) -> list[Request]:
        """The same samples in requests that ``stream`` takes."""
        together = self.shares_requests and not request.sampling.is_greedy
        runs: list[dict[int, int]] = []
        for number, seed in sorted(request.seeds.items()):
            if not (together and runs and max(runs[-1].values()) == seed - 1):
                runs.append({})
            runs[-1][number] = seed
        return [replace(request, seeds=run) for run in runs]

    @abstractmethod
    def stream(self, endpoint: Endpoint, request: Request) -> AsyncGenerator[tuple[int, Sample]]:
        """(number of the sample, all of it so far), whenever one has grown by some tokens.

        Args:
            request: One of ``parts``: its seeds follow each other.
        """

    @abstractmethod
    async def update(self, endpoint: Endpoint, update: WeightUpdate, seconds: float) -> None:
        """Make the server sample with other weights from now on; what runs goes on with them."""

    async def forget(  # noqa: B027 - where there are no adapters there is none to drop
        self, endpoint: Endpoint, update: WeightUpdate, seconds: float
    ) -> None:
        """Drop an adapter that nothing samples with any more."""


def token_versions(
    spans: Sequence[Mapping[str, Any]], num_tokens: int, adapter: WeightUpdate | None
) -> list[str]:
    """Label of the weights that wrote each token: the server's, or an adapter's own, whose weights
    never change."""
    if adapter:
        return [str(adapter.version)] * num_tokens
    return [str(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Command-line options; None and False leave one out, True has no value, a list several, and
    a mapping becomes JSON."""
    words: list[str] = []
    for name, value in options.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list | tuple) else [] if value is True else [value]
            words += [f"--{name}", *map(_as_word, values)]
    return words


def _as_word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping) else str(value)
