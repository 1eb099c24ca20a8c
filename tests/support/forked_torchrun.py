"""torchrun on a machine made of a network namespace, with a rank that is forked instead of started.

Where torchrun starts an interpreter, which needs seconds to import everything, its process is
forked: the rank has the same parent, session and environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from forked_program import Child, become_lit_grpo
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000
"""CLONE_NEWNS and CLONE_NEWNET"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""torchrun handles them."""


class Rank(Child):
    """A rank, with what torchrun uses of a ``Popen``."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(os.fork())
        if not self.pid:
            _become(words, env)


def _become(words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run ``lit-grpo`` as a process that shares nothing with torchrun, and end."""
    os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    become_lit_grpo(words[words.index("fit") :])


def enter(namespace: str) -> None:
    """Move this process to a network namespace, as ``ip netns exec`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        moved = libc.setns(file.fileno(), NEW_NETWORK)
    if moved or libc.unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    subprocess.run(["mount", "--make-rslave", "/"], check=True)


def main() -> None:
    """Run torchrun with the last of the arguments ``forked|started NAMESPACE HIDDEN WORD...``.

    An empty file system is put in the place of the directory ``HIDDEN``, unless that is "".
    """
    ranks, namespace, hidden, *words = sys.argv[1:]
    enter(namespace)
    if hidden:
        subprocess.run(["mount", "-t", "tmpfs", "none", hidden], check=True)
    if ranks == "forked":
        SubprocessHandler._popen = lambda self, args, env: Rank(args, env)  # type: ignore
    run.main(words)
