"""Print a plan: in words, as tables, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.cli.estimate.memory import ALWAYS, ELSEWHERE, MemoryEstimate, gib, when_in_words
from lit_grpo.cli.estimate.seconds import StepTime, TimePart
from lit_grpo.cli.estimate.setup import Setup
from lit_grpo.runs.tables import add_numbers, make_table, open_console, with_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory and time that a step needs, and memory that the devices have."""

    setup: Setup
    memory: MemoryEstimate
    """Memory of a rank."""
    limit: int
    """Bytes that a rank may take."""
    time: StepTime
    remedies: Sequence[str] = ()
    """Ways to make it fit, if it does not: several changes each."""
    assumed_prompt_tokens: int | None = None
    """Length of the prompts, where no data tells it."""
    missing: str = "prompts"
    """What could not be read in that case."""

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.limit

    @property
    def advice(self) -> Sequence[str]:
        """Changes that make the step fit, or take less memory."""
        return self.remedies or self.memory.advice()

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of all ranks."""
        step = self.setup.step
        sampled = self.setup.ranks * step.num_rows * step.mean_completion_tokens
        return sampled / self.time.total if self.time.total else 0.0


def describe(plan: Plan) -> list[str]:
    """Return the sentences about a plan: what was planned, what binds, what changes it."""
    return [
        _subject(plan),
        *_assumptions(plan),
        _memory_line(plan),
        *_host_line(plan),
        _time_line(plan),
    ]


def _subject(plan: Plan) -> str:
    setup, step = plan.setup, plan.setup.step
    model = setup.model
    share = "" if model.trained_parameters == model.parameters else (
        f", {with_unit(model.trained_parameters)} of them trained"
    )  # fmt: skip
    return (
        f"{with_unit(model.parameters)} parameters{share} on {setup.cluster.name}, "
        f"{setup.sharding.name}, {setup.precision}: {step.num_rows * setup.ranks:,} completions of "
        f"up to {step.completion_tokens:,} tokens a rollout step, prompts of up to "
        f"{step.prompt_lengths[0]:,}; micro-batches of up to "
        f"{step.micro_batch_tokens:,} tokens, {step.micro_batches:,} in each optimizer step."
    )


def _assumptions(plan: Plan) -> list[str]:
    if plan.assumed_prompt_tokens is None:
        return []
    return [
        f"The {plan.missing} could not be read: all prompts are taken to have "
        f"{plan.assumed_prompt_tokens:,} tokens. Set data.max_prompt_tokens to change it."
    ]


def _memory_line(plan: Plan) -> str:
    memory = plan.memory
    moment = "" if memory.moments[0] == ALWAYS else f", {memory.moments[0]}"
    largest, binding = memory.at_peak[0], memory.binding
    verdict = "fits" if plan.fits else "does not fit"
    changed = "" if binding == largest else f"; of what a setting changes, {_sized(binding)}"
    start = "It fits if you" if plan.remedies else "To lower it,"
    advice = f" {start} {'; or '.join(plan.advice)}." if plan.advice else ""
    return (
        f"Memory {verdict}: {gib(memory.peak)} of {gib(plan.limit)} a rank{moment}. The largest "
        f"part is {_sized(largest)}{changed}.{advice}"
    )


def _host_line(plan: Plan) -> list[str]:
    """Return what the ranks of a node have in its host memory, if something is offloaded."""
    size = sum(one.bytes for one in plan.memory.parts if one.when == ELSEWHERE)
    node = plan.setup.cluster.per_node * size
    return [f"A node needs {gib(node)} of host memory for what is offloaded."] if size else []


def _sized(part: Any) -> str:
    return f"{part.name}, {gib(part.bytes)}"


def _time_line(plan: Plan) -> str:
    time, binding = plan.time, plan.time.binding
    unknown = [one.name for one in time.parts if one.seconds is None]
    without = f" without {' and '.join(unknown)}, which is not known" if unknown else ""
    advice = f" To lower it, {binding.advice}." if binding.advice else ""
    return (
        f"Time: {seconds(time.total)} a rollout step{without}, "
        f"{plan.tokens_per_second:,.0f} sampled tokens/s. The largest part is {binding.name}, "
        f"{seconds(binding.seconds)}, bound by {binding.bound_by}.{advice}"
    )


def seconds(value: float | None) -> str:
    """Return a time with three digits; a question mark for one that is not known."""
    if value is None:
        return "?"
    return f"{value:,.0f} s" if value >= 1000 else f"{value:.3g} s"


def print_plan(plan: Plan) -> None:
    """Print two tables and the sentences about them."""
    console = open_console()
    subject, *others = describe(plan)
    console.print(f"{subject}\n", soft_wrap=True)
    memory = make_table("memory of a rank")
    add_numbers(memory, "")
    memory.add_column("when")
    for part in plan.memory.parts:
        memory.add_row(part.name, gib(part.bytes), when_in_words(part.when))
    for moment in plan.memory.moments:
        memory.add_row(f"all {moment}", gib(plan.memory.during(moment)), "")
    console.print(memory)
    time = make_table("time of a rollout step")
    add_numbers(time, "")
    time.add_column("bound by")
    for one in plan.time.parts:
        time.add_row(one.name, seconds(one.seconds), one.bound_by or one.advice)
    time.add_row("all", seconds(plan.time.total), "")
    console.print()
    console.print(time)
    for line in others:
        console.print(f"\n{line}", soft_wrap=True)


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as what JSON can hold; sizes in bytes."""
    setup, memory, time = plan.setup, plan.memory, plan.time
    return {
        "device": setup.cluster.device.name,
        "gpus_per_node": setup.cluster.per_node,
        "nodes": setup.cluster.num_nodes,
        "strategy": setup.sharding.name,
        "precision": setup.precision,
        "parameters": setup.model.parameters,
        "trained_parameters": setup.model.trained_parameters,
        "fits": plan.fits,
        "memory": {
            "limit": plan.limit,
            "peak": memory.peak,
            "moment": memory.moments[0],
            "binding": memory.binding.name,
            "advice": list(plan.advice),
            "parts": [
                {"name": one.name, "bytes": one.bytes, "when": list(one.when)}
                for one in memory.parts
            ],
        },
        "seconds": {
            "total": time.total,
            "binding": time.binding.name,
            "advice": time.binding.advice,
            "parts": [_json_of(one) for one in time.parts],
        },
        "sampled_tokens_per_second": plan.tokens_per_second,
        "notes": describe(plan),
    }


def _json_of(part: TimePart) -> dict[str, Any]:
    return {"name": part.name, "seconds": part.seconds, "bound_by": part.bound_by}
