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
import time
from collections.abc import Mapping, Sequence
from subprocess import TimeoutExpired

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from lit_grpo.__main__ import main as lit_grpo

NEW_MOUNTS, NEW_NETWORK = 0x00020000, 0x40000000
"""CLONE_NEWNS and CLONE_NEWNET"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""torchrun handles them."""


class Rank:
    """A rank, with what torchrun uses of a ``Popen``."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become(words, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutExpired("lit-grpo", timeout)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def _become(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Run ``lit-grpo`` as a process that shares nothing with torchrun, and end."""
    exit_code = 1
    try:
        os.setsid()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["lit-grpo", *words[words.index("fit") :]]
        exit_code = lit_grpo()
    except SystemExit as leave:
        exit_code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:  # as an interpreter would
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


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
