"""A server for tests with SGLang's native API, which samples from a real tiny model on the CPU.

``python tests/support/sglang_server.py --model-path DIR --port N`` takes the flags of ``python -m
sglang.launch_server``. Tests start it with ``running_server``, and set ``faults``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import SystemRandom
from typing import IO, Any

import yaml

from lit_grpo.stopping import PR_SET_PDEATHSIG

PARENT = "LIT_GRPO_TESTS_PARENT"
"""Variable with the process id of whom a server that `running_server` has started ends with."""
START_SECONDS = 120
ANSWER_SECONDS = 60
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class RunningServer:
    """The server as a process, the leader of its own process group."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, api_key: str | None = None
    ) -> None:
        self.process = process
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.pid = process.pid
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> tuple[int, Any]:
        """Return the status and the reply, parsed if it is JSON."""
        return self._send(urllib.request.Request(self.url + path, headers=self.headers))

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        headers = self.headers | {"content-type": "application/json"}
        data = json.dumps(body).encode()
        return self._send(urllib.request.Request(self.url + path, data=data, headers=headers))

    def _send(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
                return reply.status, _decoded(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())

    def faults(self, **faults: Any) -> None:
        """Replace all faults by these fields of ``_sglang_faults.Faults``."""
        status, reply = self.post("/test/faults", **faults)
        assert status == 200, reply

    def log(self) -> dict[str, Any]:
        """Return the fields of ``_sglang_faults.Log``."""
        return self.get("/test/log")[1]

    def reset_count(self) -> None:
        """Reset the log's ``most_unfinished``."""
        assert self.post("/test/reset_count")[0] == 200

    def kill(self) -> None:
        """Kill the whole process group, as a crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_server(model_dir: str | Path, **flags: Any) -> Iterator[RunningServer]:
    """Start a server, wait until it answers, and kill it at the end, also of a killed test runner.

    Args:
        **flags: Of the command line, with underscores: True for a flag without a value, a list for
            several values.

    Raises:
        RuntimeError: it exited or did not answer in time; the message has the end of its log.
    """
    flags = {"model_path": str(model_dir), "port": free_port()} | flags
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, __file__, *_command_line(flags)],
            env=os.environ | OFFLINE | {PARENT: str(os.getpid())},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        server = RunningServer(process, flags["port"], flags.get("api_key"))
        try:
            _wait_until_it_answers(server, log)
            yield server
        finally:
            server.kill()


def free_port() -> int:
    """Return a port that no other process takes before a server listens there.

    The kernel gives its free ports to every process. These are below them, a range per test worker.
    """
    while True:
        port = next(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _own_ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + 1000 * (worker % 20)
    start = SystemRandom().randrange(1000)  # a child process has the range of its parent
    return (first + (start + number) % 1000 for number in count())


_PORTS = _own_ports()


def _command_line(flags: dict[str, Any]) -> list[str]:
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def _wait_until_it_answers(server: RunningServer, log: IO[bytes]) -> None:
    """Poll with a call that the server's log does not count."""
    end = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        with suppress(OSError):
            server.log()
            return
        time.sleep(0.05)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read().decode()[-3000:]}")


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()


SERVED_FLAGS: dict[str, dict[str, Any]] = {
    "--model-path": {"required": True},
    "--tokenizer-path": {"help": "by default the model's own"},
    "--host": {"default": "127.0.0.1"},
    "--port": {"type": int, "default": 30000},
    "--served-model-name": {},
    "--api-key": {},
    "--config": {"help": "a YAML file with further flags"},
    "--random-seed": {"type": int, "default": 0},
    "--context-length": {"type": int},
    "--max-running-requests": {"type": int, "default": 1024},
    "--weight-version": {"default": "default"},
    "--max-lora-rank": {"type": int},
    "--lora-paths": {"nargs": "*", "default": []},
    "--lora-target-modules": {"nargs": "*"},
    "--enable-lora": {"action": "store_true"},
    "--skip-tokenizer-init": {"action": "store_true"},
    "--incremental-streaming-output": {"action": "store_true"},
    "--enable-deterministic-inference": {"action": "store_true"},
    "--enable-memory-saver": {"action": "store_true"},
    "--enable-weights-cpu-backup": {"action": "store_true"},
    "--never-healthy": {"action": "store_true", "help": "a fault, not a flag of SGLang"},
}
IGNORED_SWITCHES = ("trust-remote-code", "disable-cuda-graph", "disable-radix-cache")
IGNORED_SWITCHES += ("enable-metrics", "log-requests", "enable-dp-attention")
IGNORED_VALUES = ("dtype", "mem-fraction-static", "attention-backend", "sampling-backend")
IGNORED_VALUES += (
    "log-level",
    "log-level-http",
    "chunked-prefill-size",
    "max-loras-per-batch",
    "load-format",
)
IGNORED_VALUES += ("lora-backend", "stream-interval", "page-size", "base-gpu-id")
SIZES = {"--tp-size": "--tensor-parallel-size", "--dp-size": "--data-parallel-size"}


def parser() -> argparse.ArgumentParser:
    """Return the parser; an unknown flag is an error, as in SGLang."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, settings in SERVED_FLAGS.items():
        parser.add_argument(name, **settings)
    for name, alias in SIZES.items():
        parser.add_argument(name, alias, type=int, default=1)
    for name in IGNORED_SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in IGNORED_VALUES:
        parser.add_argument(f"--{name}")
    return parser


def with_config(words: list[str]) -> list[str]:
    """Put the flags of the file that ``--config`` names before the others, as SGLang does."""
    if "--config" not in words:
        return words
    place = words.index("--config")
    flags = yaml.safe_load(Path(words[place + 1]).read_text())
    read = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return read + words[:place] + words[place + 2 :]


def end_with_parent() -> None:
    """Let Linux kill this process when the one that started it ends, if that is wanted."""
    if parent := os.environ.get(PARENT):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it has ended already
            sys.exit(1)


def main() -> None:
    end_with_parent()
    flags = parser().parse_args(with_config(sys.argv[1:]))
    print(f"server_args={vars(flags)}", file=sys.stderr, flush=True)  # as SGLang does
    from _sglang_api import Server
    from aiohttp import web

    app = Server(flags).app()
    web.run_app(
        app, host=flags.host, port=flags.port, handler_cancellation=True, shutdown_timeout=1.0
    )


if __name__ == "__main__":
    main()
