"""Processes and counters of the vLLM servers that an engine has launched."""

from __future__ import annotations

import re
import urllib.request
from urllib.parse import urlsplit

import psutil
from served_engines import command_of

from lit_grpo.rollout.server import guard as server_guard


def processes_of(url: str, trainer: int | None = None) -> list[psutil.Process]:
    """Return a server's main process and its descendants.

    Args:
        trainer: Process id of the trainer that launched it; by default this process.
    """
    port = str(urlsplit(url).port)
    (main,) = [
        process
        for process in psutil.Process(trainer).children(recursive=True)
        if port in (command := command_of(process)) and server_guard.__file__ not in command
    ]
    return [main, *main.children(recursive=True)]


def counter(url: str, name: str) -> float:
    """Return one of the server's counters, such as ``generation_tokens_total``."""
    with urllib.request.urlopen(url + "/metrics", timeout=20) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M))
