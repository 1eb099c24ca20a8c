"""Find changes that make a large step fit: settings, a strategy, more GPUs. Each is estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations, product

from lit_grpo.cli.estimate.devices import Cluster
from lit_grpo.cli.estimate.memory import MemoryPart, estimate_memory
from lit_grpo.cli.estimate.setup import Sampler, Setup
from lit_grpo.cli.estimate.sharding import SHARDINGS

ADAPTER = (
    "train an adapter on a bfloat16 model instead of all weights (model.policy.lora: "
    "{rank: 16, alpha: 32}, model.policy.dtype: bfloat16)"
)
GPUS_OF_A_NODE = 8
MAX_NODES = 64


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of a setup, and how to make it, in words that begin with a verb."""

    words: str
    apply: Callable[[Setup], Setup]


Place = tuple[Remedy, ...]
"""The changes that lead to other devices, or to another strategy on them."""


def find_remedy(
    setup: Setup, limit: int, fixed: MemoryPart | None = None, first: str = ""
) -> str | None:
    """Return the fewest changes, on the fewest GPUs, with which a step fits; None if none do.

    Args:
        limit: Bytes that a rank may take.
        fixed: As in `estimate_memory`.
        first: A change that has been made already, such as `ADAPTER`.
    """
    for place, options in _tries(setup):
        for number in range(len(options) + 1):
            for chosen in combinations(options, number):
                changes = [*place, *chosen]
                changed = reduce(lambda one, change: change.apply(one), changes, setup)
                if _may_run(changed) and estimate_memory(changed, fixed).peak <= limit:
                    return _joined([one for one in (first, *(c.words for c in changes)) if one])
    return None


def _tries(setup: Setup) -> Iterator[tuple[Place, list[Remedy]]]:
    """Yield devices and the changes to try on them.

    Settings come before GPUs for servers. More GPUs are better than smaller parts of a step, which
    cost time, if both are needed.
    """
    settings, smaller = _settings(setup), _smaller(setup)
    mild = [*settings, *_servers(setup)]
    larger = list(_larger(setup)) if setup.cluster.is_gpu else []
    yield from product(_here(setup), [[*settings, *smaller]])
    yield from product(_here(setup), [[*mild, *smaller]])
    yield from product(larger, [mild])
    yield from product(larger, [[*mild, *smaller]])


def _may_run(setup: Setup) -> bool:
    """Return whether the engine can sample for so many ranks."""
    return setup.sampler.kind != "vllm" or setup.ranks == 1


def _joined(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _here(setup: Setup) -> Iterator[Place]:
    """Yield the devices that there are, as they are used and with the weights divided."""
    yield ()
    if setup.cluster.is_gpu and setup.ranks > 1 and not setup.sharding.weights:
        yield (Remedy("set trainer.strategy to fsdp2", _on(setup.cluster)),)


def _larger(setup: Setup) -> Iterator[Place]:
    """Yield ever more GPUs, over which the weights are divided."""
    for cluster in _clusters(setup.cluster):
        size = f"--gpus {cluster.per_node}x{cluster.device.name}"
        nodes = f" --nodes {cluster.num_nodes}" if cluster.num_nodes > 1 else ""
        words = [f"use at least {cluster.num_ranks} GPUs ({size}{nodes})"]
        if not setup.sharding.weights:
            words.append("set trainer.strategy to fsdp2")
        if setup.ranks * setup.step.num_prompts % cluster.num_ranks:
            words.append(f"set data.prompts_per_step to a multiple of {cluster.num_ranks}")
        yield tuple(Remedy(one, _on(cluster)) for one in words)


def _clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield larger clusters: of one node, then of several with all of their GPUs."""
    node = max(GPUS_OF_A_NODE, cluster.per_node)
    sizes = [(number, 1) for number in range(1, node)]
    sizes += [(node, number) for number in range(1, MAX_NODES + 1)]
    for per_node, num_nodes in sizes:
        if per_node * num_nodes > cluster.num_ranks:
            yield replace(cluster, per_node=per_node, num_nodes=num_nodes)


def _on(cluster: Cluster) -> Callable[[Setup], Setup]:
    """Return the change to a cluster, over which the weights are divided.

    A rank keeps its prompts, which it has fewer of if the step stays as large.
    """

    def move(setup: Setup) -> Setup:
        sharding = setup.sharding if setup.sharding.weights else SHARDINGS["fsdp2"]
        return replace(setup, cluster=cluster, sharding=sharding)

    return move


def _settings(setup: Setup) -> list[Remedy]:
    """Return the changes of settings that leave the parts of a step as large as they are."""
    is_gpu = setup.cluster.is_gpu
    found = []
    if not setup.checkpointing:
        words = "set model.policy.gradient_checkpointing to true"
        found.append(Remedy(words, lambda one: replace(one, checkpointing=True)))
    if is_gpu and setup.precision == "32-true" and not setup.computes_in_weights:
        words = "set trainer.precision to bf16-mixed"
        found.append(Remedy(words, lambda one: replace(one, precision="bf16-mixed")))
    return found


def _servers(setup: Setup) -> list[Remedy]:
    """Return the change to servers that sample, which need GPUs of their own."""
    sampler, found = setup.sampler, []
    if setup.cluster.is_gpu and (sampler.kind in ("policy", "vllm") or sampler.memory_fraction):
        words = (
            "sample with servers on GPUs that no rank uses (--config engines/vllm_server with "
            "launch.devices, or with launch: null and the urls of servers on other machines)"
        )
        served = Sampler(kind="servers", value_bytes=sampler.value_bytes)
        found.append(Remedy(words, lambda one: replace(one, sampler=served)))
    return found


def _smaller(setup: Setup) -> list[Remedy]:
    """Return the changes to smaller parts of a step: a completion, some groups at a time."""
    step, sampler = setup.step, setup.sampler
    found = []
    if step.budget is not None and step.micro_batch_rows > 1:
        words = f"lower model.update.max_tokens_per_micro_batch to {step.row_tokens}"
        single = replace(
            step,
            micro_batches=step.micro_batches * step.micro_batch_rows,
            micro_batch_rows=1,
            micro_batch_tokens=step.row_tokens,
        )
        found.append(Remedy(words, lambda one: replace(one, step=single)))
    if sampler.kind == "policy":
        for number in _fewer_at_a_time(setup):
            words = f"lower model.engine.init_args.max_concurrent to {number}"
            few = replace(sampler, max_concurrent=number)
            found.append(Remedy(words, partial(replace, sampler=few)))
    return found


def _fewer_at_a_time(setup: Setup) -> list[int]:
    """Return smaller numbers of completions that are sampled together, of whole groups."""
    group, most = setup.step.group_size, min(setup.step.num_rows, setup.sampler.max_concurrent)
    numbers = {max(group, most // part // group * group) for part in (2, 4, 16, most)}
    return sorted((one for one in numbers if one < most), reverse=True)
