"""The vLLM servers of an engine as the operating system and their own counters see them."""

from __future__ import annotations

import re
import urllib.request
from urllib.parse import urlsplit

import psutil


def processes_of(url: str, trainer: int | None = None) -> list[psutil.Process]:
    """A server's main process and all below it, below a process; this one by default."""
    port = str(urlsplit(url).port)
    (main,) = [
        process
        for process in psutil.Process(trainer).children(recursive=True)
        if port in (line := process.cmdline()) and not line[1].endswith("_guard.py")
    ]
    return [main, *main.children(recursive=True)]


def counter(url: str, name: str) -> float:
    """One of the server's own counters, such as ``generation_tokens_total``."""
    with urllib.request.urlopen(url + "/metrics", timeout=20) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M))
