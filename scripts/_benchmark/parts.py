"""Measure single parts of a step: HFEngine against ``model.generate``, and the head's memory."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from _benchmark.processes import Repetitions
from _benchmark.results import Result
from _benchmark.workloads import EOS, PAD, ModelSize, Workload, write_inputs
from transformers import GenerationConfig

HEAD_TARGET = 1 / 8
HEAD_VOCAB = 150_000


def compare_engine(
    workload: Workload, size: ModelSize, repetitions: Repetitions
) -> Iterator[Result]:
    """Time both on the same prompts in turns, each with its own sampler."""
    policy = loaded_policy(workload, size)
    samplers = {
        "HFEngine": engine_sampler(policy, workload),
        "model.generate": generate_sampler(policy, workload),
    }
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    lengths: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(1 + repetitions.rounds * repetitions.steps):
        for name, sample in samplers.items():
            start = time.perf_counter()
            lengths[name].append(mean(sample(number)))
            if number:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    yield Result(
        figure="engine",
        case=workload.name,
        against="model.generate",
        ours=median(seconds["HFEngine"]),
        other=median(seconds["model.generate"]),
        unit="s",
        details={name: {"mean length": mean(values)} for name, values in lengths.items()},
    )


def loaded_policy(workload: Workload, size: ModelSize) -> Any:
    from lit_grpo.policy import Policy

    with TemporaryDirectory() as name:
        write_inputs(workload, size, 1, Path(name))
        policy: Any = Policy(path=name, dtype=size.dtype)  # type: ignore[arg-type]
        policy.load(with_reference=False)
        assert policy.tokenizer  # loaded lazily: load it before its files are deleted
    return policy.to("cuda" if torch.cuda.is_available() else "cpu")


Sampler = Callable[[int], list[int]]
"""Seed -> length of each completion."""


def engine_sampler(policy: Any, workload: Workload) -> Sampler:
    from lit_grpo.rollout import HFEngine, Sampling

    engine = HFEngine()
    engine.load_weights(policy, 0)
    prompts = as_prompts(random_ids(policy, workload))
    sampling = Sampling(max_tokens=workload.max_tokens)

    def sample(seed: int) -> list[int]:
        sampled = engine.generate(prompts, workload.group_size, sampling, seed=seed)
        return [len(completion.token_ids) for _, completion in sampled]

    return sample


def generate_sampler(policy: Any, workload: Workload) -> Sampler:
    ids = random_ids(policy, workload).repeat_interleave(workload.group_size, 0)
    ids = ids.to(policy.model.device)
    config = GenerationConfig(
        max_new_tokens=workload.max_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )

    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        policy.model.eval()
        rows = policy.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config
        )
        not_ended = (rows[:, workload.prompt_tokens :] == EOS).cumsum(1) == 0
        lengths: list[int] = (not_ended.sum(1) + 1).clamp(max=workload.max_tokens).tolist()
        return lengths

    return sample


def random_ids(policy: Any, workload: Workload) -> torch.Tensor:
    """Return random prompt ids [B, P]."""
    generator = torch.Generator().manual_seed(0)
    shape = (workload.num_prompts, workload.prompt_tokens)
    return torch.randint(PAD + 1, policy.model.config.vocab_size, shape, generator=generator)


def as_prompts(ids: torch.Tensor) -> list[Any]:
    """Return prompts with these token ids [B, P]."""
    from lit_grpo.types import Prompt

    return [
        Prompt(id=str(number), text=f"{number}+1=", token_ids=tuple(row))
        for number, row in enumerate(ids.tolist())
    ]


def compare_head(num_tokens: int) -> Iterator[Result]:
    """Compare the peak memory of logprobs and their gradient, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    peaks = []
    for run in (chunked_head, full_logits):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            peaks.append(pool.submit(peak_gb, run, num_tokens).result())
    yield Result(
        figure="head",
        case=f"{num_tokens} tokens",
        against=f"full logits over {HEAD_VOCAB:,} tokens of vocabulary",
        ours=peaks[0],
        other=peaks[1],
        unit="GiB",
        target=HEAD_TARGET,
    )


def peak_gb(run: Callable[[Any, torch.Tensor], None], num_tokens: int) -> float:
    """Return the largest growth of memory over what a few tokens need, in units of 2^30 bytes."""
    from lit_grpo.policy import Policy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    architecture = {
        "model_type": "llama",
        "vocab_size": HEAD_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    policy = Policy(architecture=architecture)
    policy.load(with_reference=False)
    policy.to(device)
    # Eight different rows: a prompt of one token, then the completion.
    ids = torch.randint(HEAD_VOCAB, (8, 1 + num_tokens // 8), device=device)
    run(policy, ids[:, :2])  # allocates the gradients
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(policy, ids)
        return (torch.cuda.max_memory_allocated() - before) / 2**30
    before = int(psutil.Process().memory_info().rss)
    run(policy, ids)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**30


def chunked_head(policy: Any, ids: torch.Tensor) -> None:
    """Compute logprobs as the trainer does, and their gradient."""
    from lit_grpo.policy.logprobs import completion_statistics
    from lit_grpo.types import TokenBatch

    ids = ids.cpu()
    prompts, completions = ids[:, :1], ids[:, 1:]
    batch = TokenBatch(
        prompt_ids=prompts,
        prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
        prompt_index=torch.arange(len(ids)),
        completion_ids=completions,
        completion_mask=torch.ones_like(completions, dtype=torch.bool),
    )
    completion_statistics(policy.body_and_head, batch).logprobs.sum().backward()


def full_logits(policy: Any, ids: torch.Tensor) -> None:
    """Compute logprobs from the full logits, without an entropy, and their gradient."""
    logits = policy.model(input_ids=ids, use_cache=False).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1)
    logprobs.gather(-1, ids[:, 1:, None]).sum().backward()
