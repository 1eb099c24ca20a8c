"""What it takes to start servers: ports, a model to start with, commands, logs. Watches nothing."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lit_grpo.rollout._dialect import Dialect, Launch, Model
from lit_grpo.rollout._process import ServerProcess
from lit_grpo.rollout._weights import save_weights
from lit_grpo.rollout.engine import SampledPolicy

log = logging.getLogger(__name__)


def choose_ports(launch: Launch) -> list[int]:
    """One for each server: the configured ones, or free ones.

    Raises:
        ValueError: a configured one is taken.
    """
    if launch.port is None:
        return _free_ports(launch.host, launch.num_servers)
    ports = [launch.port + number for number in range(launch.num_servers)]
    for port in ports:
        try:
            _bound(launch.host, port).close()
        except OSError as error:
            raise ValueError(
                f"port {port} of {launch.host} cannot be listened on: {error.strerror} (another "
                "server may run there, and would get this run's requests). End it, set "
                "model.engine.init_args.launch.port to another one or to null for a free one, or "
                "attach to it with model.engine.init_args.urls."
            ) from None
    return ports


def _free_ports(host: str, number: int) -> list[int]:
    sockets = [_bound(host, 0) for _ in range(number)]  # all at once, so that they differ
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def server_starts(
    dialect: Dialect,
    launch: Launch,
    model: Model,
    ports: Sequence[int],
    logs: Path,
) -> list[Callable[[], ServerProcess]]:
    """What starts each server, each time anew; their logs are ``server_0.log`` and so on."""
    starts: list[Callable[[], ServerProcess]] = []
    for number, port in enumerate(ports):
        env = dict(dialect.env(launch))
        if launch.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = launch.devices[number]
        command = dialect.command(launch, model, port)
        log_path = logs / f"server_{number}.log"
        env |= launch.env or {}
        starts.append(partial(ServerProcess, command, env, log_path))
    return starts


def model_to_serve(
    policy: SampledPolicy, directory: Path, *, dtype: str, with_adapters: bool
) -> Model:
    """The policy, or the base that its adapters will be put on."""
    path = model_to_start_with(policy, directory)
    if not with_adapters:
        return Model(path=path, dtype=dtype, adapter_rank=None)
    rank = policy.model.peft_config["default"].r
    return Model(path=path, dtype=dtype, adapter_rank=rank, adapter_modules=_adapted(policy.model))


def _adapted(model: Any) -> tuple[str, ...]:
    """Names of the layers that its adapter is put on."""
    from peft.tuners.lora import LoraLayer

    paths = [path for path, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def model_to_start_with(policy: SampledPolicy, directory: Path) -> str:
    """Where a server finds the policy's architecture and, for an adapter, its base.

    Weights that stand nowhere are written once.
    """
    if policy.source is not None:
        return policy.source
    with _without_adapter(policy.model):
        save_weights(policy.model, directory, dtype=None, is_writer=True)
    policy.tokenizer.save_pretrained(str(directory))
    return str(directory)


def _without_adapter(model: Any) -> AbstractContextManager[None]:
    """Its adapter adds nothing meanwhile: it is sent on its own."""
    if not hasattr(model, "peft_config"):
        return nullcontext()
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(model, 0.0)


def warn_of_public_address(url: str) -> None:
    """The endpoints that update weights execute what they are sent."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return  # that it cannot be reached shows soon enough
    if any(_is_public(str(address)) for address in addresses):
        log.warning(
            "%s is no loopback or private address: whoever reaches it can have the server execute "
            "code. Bind it to 127.0.0.1 or to a private network.",
            url,
        )


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_unspecified or not (parsed.is_private or parsed.is_loopback)
