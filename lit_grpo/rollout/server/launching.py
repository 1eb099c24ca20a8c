"""What it takes to start servers: ports, a model to start with, commands, logs. Watches nothing."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lit_grpo.rollout.engine import SampledPolicy
from lit_grpo.rollout.server.api import Launch, Model, ServerAPI
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.weights.files import save_weights
from lit_grpo.types import UserError

log = logging.getLogger(__name__)


def choose_ports(launch: Launch) -> list[int]:
    """One for each server: the configured ones, or free ones.

    Raises:
        ValueError: a configured one is taken, or the host is not this machine.
    """
    if launch.port is None:
        try:
            return _free_ports(launch.host, launch.num_servers)
        except OSError as error:
            raise UserError(
                f"launch.host must be an address of this machine, got {launch.host!r} "
                f"({error.strerror}). Set model.engine.init_args.launch.host."
            ) from None
    ports = [launch.port + number for number in range(launch.num_servers)]
    for port in ports:
        try:
            _bound(launch.host, port).close()
        except OSError as error:
            raise UserError(
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
    api: ServerAPI,
    launch: Launch,
    model: Model,
    ports: Sequence[int],
    logs: Path,
) -> list[Callable[[], ServerProcess]]:
    """What starts each server, each time anew; their logs are ``server_0.log`` and so on."""
    starts: list[Callable[[], ServerProcess]] = []
    for number, port in enumerate(ports):
        env = dict(api.env(launch))
        if launch.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = launch.devices[number]
        command = api.command(launch, model, port)
        log_path = logs / f"server_{number}.log"
        env |= launch.env or {}
        starts.append(partial(_start, command, env, log_path, (launch.host, port)))
    return starts


def _start(
    command: Sequence[str], env: Mapping[str, str], log_path: Path, address: tuple[str, int]
) -> ServerProcess:
    """
    Raises:
        OSError: somebody listens at its address meanwhile, who would get its requests and weights.
    """
    _bound(*address).close()
    return ServerProcess(command, env, log_path)


def model_to_serve(
    policy: SampledPolicy, directory: Path, *, dtype: str, with_adapters: bool
) -> Model:
    """The policy, or the base that its adapters will be put on."""
    path = model_to_start_with(policy, directory)
    tokenizer = save_tokenizer(policy, directory / "tokenizer")
    plain = Model(path=path, tokenizer=tokenizer, dtype=dtype, adapter_rank=None)
    if not with_adapters:
        return plain
    rank = policy.model.peft_config["default"].r
    return replace(plain, adapter_rank=rank, adapter_modules=_adapted(policy.model))


def save_tokenizer(policy: SampledPolicy, directory: Path) -> str:
    """Where a server finds the policy's, which need not be the model's own."""
    policy.tokenizer.save_pretrained(str(directory))
    policy.model.config.save_pretrained(str(directory))
    return str(directory)


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
    return str(directory)


def _without_adapter(model: Any) -> AbstractContextManager[None]:
    """Its adapter adds nothing meanwhile: it is sent on its own."""
    if not hasattr(model, "peft_config"):
        return nullcontext()
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(model, 0.0)


def check_url(url: str) -> None:
    """
    Raises:
        ValueError: it names no server.
    """
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of its host or port
        is_whole = False
    if not is_whole:
        raise UserError(
            f"urls must be such as 'http://10.0.0.2:8000', got {url!r}. Set "
            "model.engine.init_args.urls."
        )


def is_on_this_machine(url: str) -> bool:
    """As far as its address tells."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
