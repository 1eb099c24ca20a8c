"""Two machines made of network namespaces: what runs on one reaches the other by its address only.

They share the file system. Making them needs root on Linux; `needs_nodes` skips tests elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

import processes
from needs import needs

RENDEZVOUS_PORT = 29400


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: its rank among the two, the name of its namespace, and its address."""

    rank: int
    name: str
    address: str

    @property
    def link(self) -> str:
        """The network interface that leads to the other machine."""
        return f"{self.name}n"

    @property
    def variables(self) -> dict[str, str]:
        """What a process on this machine needs in its environment."""
        return {"GLOO_SOCKET_IFNAME": self.link, "NCCL_SOCKET_IFNAME": self.link}

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this machine."""
        return ["ip", "netns", "exec", self.name, *words]

    def running(
        self, words: Sequence[str], cwd: Path, *, said: Path, **variables: str
    ) -> AbstractContextManager[Popen[str]]:
        """Start a command on this machine, and kill its process group in the end."""
        settings = self.variables | variables
        return processes.running(self.words(words), cwd, said=said, **settings)

    def pids(self) -> list[int]:
        """Return the processes that run on this machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        return [int(word) for word in listed.stdout.split()]

    def crash(self) -> None:
        """Kill all processes at once, as a kernel panic or a lost job step would."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def unplug(self) -> None:
        """Cut the network: the other machine gets no answer any more, and no refusal either."""
        _ip("-n", self.name, "link", "set", self.link, "down")


def can_make_nodes() -> bool:
    """Return whether this process may make network namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True)
    return made.returncode == 0


needs_nodes = needs(
    "namespaces", can_make_nodes(), "network namespaces need root on Linux, and iproute2"
)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Make two machines on a network of their own, and end all that runs on them at the end."""
    prefix = f"lg{os.getpid() % 100000}"
    one, other = (Node(rank, f"{prefix}{rank}", f"10.77.0.{rank + 1}") for rank in (0, 1))
    try:
        for node in (one, other):
            _ip("netns", "add", node.name)
            _ip("-n", node.name, "link", "set", "lo", "up")
        pair = ["link", "add", one.link, "netns", one.name, "type", "veth"]
        _ip(*pair, "peer", "name", other.link, "netns", other.name)
        for node in (one, other):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", node.link)
            _ip("-n", node.name, "link", "set", node.link, "up")
        yield one, other
    finally:
        for node in (one, other):
            with suppress(subprocess.CalledProcessError):
                node.crash()
                _ip("netns", "delete", node.name)


def torchrun(node: Node, first: Node, *, num_processes: int = 1) -> list[str]:
    """Return the first arguments of torchrun, with which it starts a program on two machines."""
    return [
        *("--nnodes", "2", "--node-rank", str(node.rank)),
        *("--nproc-per-node", str(num_processes)),
        *("--master-addr", first.address, "--master-port", str(RENDEZVOUS_PORT)),
    ]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
