"""Sample and score completions for prepared data, except for those that are in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lit_grpo.cli.analyze.sample_cache import SampleCache
from lit_grpo.data.rows.prepared import PreparedDir
from lit_grpo.training import GRPOModule
from lit_grpo.training.collecting.checked_engine import generate
from lit_grpo.training.seeds import SeedPurpose
from lit_grpo.types import Completion, Prompt, RolloutBatch

COMPLETIONS_AT_ONCE = 512


def samples_of(prepared: PreparedDir) -> Path:
    """Return where the completions of policies on prepared data are kept: next to the data."""
    path = prepared.path.resolve()
    return path.with_name(f"{path.name}.samples")


def sampled(
    module: GRPOModule, prompts: Sequence[Prompt], cache: SampleCache
) -> Iterator[RolloutBatch]:
    """Yield scored completions of all prompts, some at a time.

    Raises:
        EngineBug: the engine does not keep its contract, or has a bug.
    """
    suite, group_size = module.rewards, module.group_size
    at_once = max(1, COMPLETIONS_AT_ONCE // group_size)
    console = Console(stderr=True)
    num_known = sum(min(group_size, cache.count(prompt)) for prompt in prompts)
    if num_known:
        total = len(prompts) * group_size
        console.print(
            f"{num_known:,} of {total:,} completions were sampled before: {cache.directory}",
            soft_wrap=True,
        )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("sampling", total=len(prompts) * group_size)
        for number, start in enumerate(range(0, len(prompts), at_once)):
            some = prompts[start : start + at_once]
            scoring = suite.open(some, group_size)
            known = _known(some, group_size, cache)
            for row, completion in known.items():
                scoring.add(row, completion)
            progress.advance(task, len(known))
            new = _sample_others(module, some, number, cache)
            for row, completion in new:
                progress.advance(task)
                scoring.add(row, completion)
            yield scoring.result()
            scoring.warn_of_bugs()


def _known(prompts: Sequence[Prompt], group_size: int, cache: SampleCache) -> dict[int, Completion]:
    """Return row -> completion of what the cache has; a group's first rows are filled first."""
    return {
        row: completion
        for place, prompt in enumerate(prompts)
        for row, completion in enumerate(
            islice(cache.completions(prompt), group_size), place * group_size
        )
    }


def _sample_others(
    module: GRPOModule, prompts: Sequence[Prompt], number: int, cache: SampleCache
) -> Iterator[tuple[int, Completion]]:
    """Yield (row, completion) of the rows that the cache lacks, and add each to the cache.

    Args:
        number: Index of this batch of prompts, for the seed.
    """
    group_size = module.group_size
    lacking: dict[int, list[int]] = {}
    """The places of the prompts by how many completions they lack."""
    for place, prompt in enumerate(prompts):
        if (num_known := cache.count(prompt)) < group_size:
            lacking.setdefault(group_size - num_known, []).append(place)
    for num_new, places in lacking.items():
        some = [prompts[place] for place in places]
        seed = module.seeds.derive(SeedPurpose.ROLLOUT, number, num_new)
        for row, completion in generate(module.engine, some, num_new, module.sampling, seed=seed):
            place = places[row // num_new]
            yield (place + 1) * group_size - num_new + row % num_new, completion
            cache.add(prompts[place], completion)
