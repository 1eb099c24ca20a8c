"""Engines with the test server for SGLang: attached to a running one, or launched."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import sglang_server
import torch
from sglang_server import OFFLINE, RunningServer, with_config
from tiny import prompt
from worker_processes import wait_until

from lit_grpo.rollout import EngineFailed, Launch, Sampling, SGLangEngine, Supervision
from lit_grpo.rollout.server import guard as server_guard
from lit_grpo.types import Completion, Prompt

PROMPTS = [prompt("12+34=", id="a"), prompt("a longer prompt", id="b"), prompt("x", id="c")]
PLAIN = Sampling(max_tokens=12)
LONG = Sampling(max_tokens=60)
SEEDED = {"enable_deterministic_inference": True, "incremental_streaming_output": True}
LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]}
PROGRAM = [sys.executable, sglang_server.__file__]
QUICK = {
    "startup_timeout": 60.0,
    "health_interval": 0.2,
    "health_timeout": 20.0,
    "weight_sync_timeout": 30.0,
    "max_restarts": 2,
    "first_backoff": 0.1,
    "max_backoff": 0.2,
}


def launch(**settings) -> Launch:
    return Launch(**({"program": PROGRAM, "env": OFFLINE} | settings))


@contextmanager
def serving(policy, *, version: int = 0, **settings) -> Iterator[SGLangEngine]:
    """Start an engine with the policy's weights; ``supervision`` overrides the quick settings."""
    supervision = Supervision(**(QUICK | settings.pop("supervision", {})))
    engine = SGLangEngine(supervision=supervision, **settings)
    try:
        engine.start(policy)
        if version >= 0:
            engine.load_weights(policy, version)
        yield engine
    finally:
        engine.close()


def generate(
    engine, prompts, sampling: Sampling, *, group_size: int = 4, seed: int = 0
) -> list[Completion]:
    """Return the completions in order; every row must come once."""
    pairs = list(engine.generate(prompts, group_size, sampling, seed=seed))
    assert sorted(row for row, _ in pairs) == list(range(len(prompts) * group_size))
    return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]


def assert_same(completions: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(completions, expected, strict=True):
        assert one.token_ids == other.token_ids, one.failure
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-4)
        assert one.policy_versions == other.policy_versions


@contextmanager
def generating(engine, servers, sampling=LONG) -> Iterator[Future[list[Completion]]]:
    """Yield the future of a generation whose 12 rows the servers hold after three tokens."""
    for server in servers:
        server.faults(hold_after_tokens=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, PROMPTS, sampling)
        wait_until(lambda: sum(server.log()["held"] for server in servers) == 12)
        yield running


def hurry(engine, **timeouts: float) -> None:
    """Shorten timeouts of the supervision, once a test has brought about what they are to end."""
    for name, seconds in timeouts.items():
        assert hasattr(engine.supervision, name)
        object.__setattr__(engine.supervision, name, seconds)


def wait_until_ready(engine, number: int = 2) -> None:
    """Wait until so many servers of an engine are ready."""
    wait_until(lambda: engine.observe().means["rollout/ready_fraction"] == [1.0] * number)


def failure_of(policy, **settings) -> str:
    """Return the message with which an engine fails before its first update is complete."""
    with pytest.raises(EngineFailed) as failure, serving(policy, **settings):
        pass
    return str(failure.value)


@torch.no_grad()
def assert_written_by(
    models: dict[int, torch.nn.Module],
    prompts: list[Prompt],
    completions: list[Completion],
    temperature: float = 1.0,
    tolerance: float = 1e-4,
) -> None:
    """Assert that each token has the logprob that the model of its version gives it."""
    group_size = len(completions) // len(prompts)
    for row, completion in enumerate(completions):
        prompt_ids, ids = prompts[row // group_size].token_ids, completion.token_ids
        assert len(ids) == len(completion.policy_versions) > 0, completion.failure
        versions = torch.tensor(completion.policy_versions)
        theirs = torch.tensor(completion.sampler_logprobs)
        for version in versions.unique().tolist():
            logits = models[version](torch.tensor([prompt_ids + ids])).logits[0]
            full = (logits[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
            ours = full.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(
                theirs[versions == version], ours[versions == version], atol=tolerance, rtol=0
            )


def launched_servers(trainer: int | None = None) -> list[RunningServer]:
    """Return the servers that the engines of a process have launched, in the order of ports."""
    found = []
    for process in psutil.Process(trainer).children(recursive=True):
        command, parents = command_of(process), command_of(process.parent())
        if command[:2] == PROGRAM and server_guard.__file__ in parents:
            port = int(command[command.index("--port") + 1])
            words = with_config(command[2:])
            key = words[words.index("--api-key") + 1]
            found.append(RunningServer(_as_popen(process), port, key))
    return sorted(found, key=lambda server: server.port)


def command_of(process: psutil.Process | None) -> list[str]:
    """Return the command line of a process; empty if it has exited."""
    try:
        return process.cmdline() if process else []
    except psutil.Error:
        return []


def _as_popen(process: psutil.Process) -> subprocess.Popen:
    return SimpleNamespace(pid=process.pid, wait=process.wait)  # type: ignore[return-value]
