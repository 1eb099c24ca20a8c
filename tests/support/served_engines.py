"""Engines before the tests' own SGLang server: attached to it, or with processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import sglang_server
import torch
from sglang_server import OFFLINE, RunningServer
from tiny import prompt

from lit_grpo.policy import Policy
from lit_grpo.rollout import Launch, Sampling, SGLangEngine, Supervision
from lit_grpo.rollout.server import guard as server_guard
from lit_grpo.types import Completion, Prompt

PROMPTS = [prompt("12+34=", id="a"), prompt("a longer prompt", id="b"), prompt("x", id="c")]
PLAIN = Sampling(max_tokens=12)
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
    """A started engine with the policy's weights; ``supervision`` are its quick settings."""
    supervision = Supervision(**(QUICK | settings.pop("supervision", {})))
    engine = SGLangEngine(supervision=supervision, **settings)
    try:
        engine.start(policy)
        if version >= 0:
            engine.load_weights(policy, version)
        yield engine
    finally:
        engine.close()


def stirred(policy: Policy, *, seed: int = 5) -> Policy:
    """The policy with other trainable weights than it had."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def generate(
    engine, prompts, sampling: Sampling, *, group_size: int = 4, seed: int = 0
) -> list[Completion]:
    """Every row once, in order."""
    pairs = list(engine.generate(prompts, group_size, sampling, seed=seed))
    assert sorted(row for row, _ in pairs) == list(range(len(prompts) * group_size))
    return [completion for _, completion in sorted(pairs, key=lambda pair: pair[0])]


@torch.no_grad()
def assert_written_by(
    models: dict[int, torch.nn.Module],
    prompts: list[Prompt],
    completions: list[Completion],
    temperature: float = 1.0,
) -> None:
    """Each token has the logprob that the model of its version gives it, by one plain pass."""
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
                theirs[versions == version], ours[versions == version], atol=1e-4, rtol=0
            )


def launched_servers(trainer: int | None = None) -> list[RunningServer]:
    """Those that the engines of a process have started, in the order of their ports."""
    found = []
    for process in psutil.Process(trainer).children(recursive=True):
        command, parents = _command(process), _command(process.parent())
        if command[:2] == PROGRAM and server_guard.__file__ in parents:
            port = int(command[command.index("--port") + 1])
            found.append(RunningServer(_as_popen(process), port))
    return sorted(found, key=lambda server: server.port)


def _command(process: psutil.Process | None) -> list[str]:
    """Empty where it has ended."""
    try:
        return process.cmdline() if process else []
    except psutil.Error:
        return []


def _as_popen(process: psutil.Process) -> subprocess.Popen:
    return SimpleNamespace(pid=process.pid, wait=process.wait)  # type: ignore[return-value]
