"""Write the sweeps of ``lit-grpo plan`` into ``docs/scale.md`` and draw ``docs/scale.png``.

Run it after a change of ``lit_grpo/cli/estimate``:

    python scripts/scale.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from torch.optim import AdamW

from lit_grpo.cli.estimate.devices import DEVICES, Cluster
from lit_grpo.cli.estimate.memory import MemoryEstimate, estimate_memory
from lit_grpo.cli.estimate.seconds import StepTime, estimate_seconds
from lit_grpo.cli.estimate.setup import Sampler, Setup, make_setup
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.cli.plan.command import limit_of
from lit_grpo.policy import LoRA, Policy
from lit_grpo.training import MasterAdamW, UpdateConfig

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE = DOCS / "scale.md", DOCS / "scale.png"
MARKS = re.compile(r"(<!-- sweeps: .*? -->\n).*?(<!-- end of sweeps -->)", re.DOTALL)

Dtype = Literal["float32", "bfloat16"]

PROMPTS, GROUP, PROMPT_TOKENS, COMPLETION_TOKENS = 256, 8, 512, 1024
MAX_CONCURRENT = 128
"""Completions that the policy samples together on a GPU."""
GPUS = (1, 8, 32)
PER_NODE = 8


def shape(
    kind: str, hidden: int, inner: int, layers: int, heads: int, vocabulary: int
) -> dict[str, Any]:
    """Return ``model.policy.architecture`` of a Qwen2.5 or a Llama 3.1."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": {12: 2, 28: 4}.get(heads, 8),
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": hidden < 2000,
    }


MODELS = {
    "Qwen2.5-1.5B": shape("qwen2", 1536, 8960, 28, 12, 151936),
    "Llama-3.1-8B": shape("llama", 4096, 14336, 32, 32, 128256),
    "Qwen2.5-32B": shape("qwen2", 5120, 27648, 64, 40, 152064),
    "Llama-3.1-70B": shape("llama", 8192, 28672, 80, 64, 128256),
}
QWEN_7B = shape("qwen2", 3584, 18944, 28, 28, 152064)


class RoundsAtRandom(AdamW):
    """Stands for the optimizers of torchao."""

    bf16_stochastic_round = True


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a model is trained."""

    strategy: str
    optimizer: type[AdamW] | type[MasterAdamW] = AdamW
    optimizer_bytes: float | None = None
    dtype: Dtype = "float32"
    lora: int | None = None
    served: bool = False
    """Whether servers sample, on as many further GPUs."""


METHODS = {
    "ddp": Method(strategy="auto"),
    "fsdp2": Method(strategy="fsdp2"),
    "deepspeed_stage_2": Method(strategy="deepspeed_stage_2"),
    "deepspeed_stage_3": Method(strategy="deepspeed_stage_3"),
    "ddp, LoRA": Method(strategy="auto", dtype="bfloat16", lora=64),
    "fsdp2, servers": Method(strategy="fsdp2", served=True),
    "deepspeed_stage_3, servers": Method(strategy="deepspeed_stage_3", served=True),
    "fsdp2, LoRA, servers": Method(strategy="fsdp2", dtype="bfloat16", lora=64, served=True),
}
ON_ONE_GPU = {
    "float32 weights, bf16-mixed, AdamW": Method(strategy="auto"),
    "float32 weights, bf16-mixed, 8-bit AdamW": Method(strategy="auto", optimizer_bytes=2),
    "bfloat16 weights, MasterAdamW": Method(
        strategy="auto", dtype="bfloat16", optimizer=MasterAdamW
    ),
    "bfloat16 weights, AdamW of torchao with stochastic rounding": Method(
        strategy="auto", dtype="bfloat16", optimizer=RoundsAtRandom, optimizer_bytes=4
    ),
    "bfloat16 weights, 8-bit AdamW of torchao with stochastic rounding": Method(
        strategy="auto", dtype="bfloat16", optimizer=RoundsAtRandom, optimizer_bytes=2
    ),
    "LoRA of rank 64 on bfloat16 weights": Method(strategy="auto", dtype="bfloat16", lora=64),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One setup and what it needs."""

    setup: Setup
    memory: MemoryEstimate
    time: StepTime

    @property
    def fits(self) -> bool:
        return self.memory.peak <= limit_of(self.setup.cluster)

    def __str__(self) -> str:
        size = f"{self.memory.peak / 2**30:,.0f} GiB"
        return f"{size}, {self.time.total:,.0f} s" if self.fits else f"({size})"


@cache
def outline(model: str, dtype: Dtype, lora: int | None) -> Any:
    adapter = None if lora is None else LoRA(rank=lora)
    architecture = MODELS.get(model, QWEN_7B)
    return Policy(architecture=architecture, dtype=dtype, lora=adapter).outline()


def plan(
    model: str,
    method: Method,
    num_gpus: int,
    *,
    budget: int = 16384,
    max_concurrent: int = MAX_CONCURRENT,
) -> Cell:
    """Return what a model needs on H100, with gradient checkpointing."""
    update = UpdateConfig(max_tokens_per_micro_batch=budget)
    prompts = [PROMPT_TOKENS] * (PROMPTS // num_gpus)
    sizes = step_sizes(
        prompts, COMPLETION_TOKENS, num_ranks=num_gpus, group_size=GROUP, update=update
    )
    nodes = max(1, num_gpus // PER_NODE)
    cluster = Cluster(device=DEVICES["H100"], per_node=num_gpus // nodes, num_nodes=nodes)
    source = outline(model, method.dtype, method.lora)
    own = Sampler(max_concurrent=max_concurrent)
    setup = make_setup(
        source,
        partial(method.optimizer, fused=True),
        sizes,
        cluster,
        strategy=method.strategy if num_gpus > 1 else "auto",
        precision="bf16-mixed",
        optimizer_bytes=method.optimizer_bytes,
        checkpointing=True,
        sampler=_servers(model, num_gpus) if method.served else own,
    )
    memory, time = estimate_memory(setup), estimate_seconds(setup, sizes.num_rows)
    return Cell(setup=setup, memory=memory, time=time)


def _servers(model: str, num_gpus: int) -> Sampler:
    """Return servers on as many GPUs, each on as many as hold the weights and a cache."""
    of_one = min(num_gpus, {"Qwen2.5-32B": 2, "Llama-3.1-70B": 4}.get(model, 1))
    return Sampler(kind="servers", num_gpus=num_gpus, gpus_per_copy=of_one, transfer="nccl")


def sweeps() -> str:
    """Return the tables of the page."""
    return "\n".join(["", *_models(), *_one_gpu()])


def _models() -> Iterator[str]:
    counts = " | ".join(f"{number} x H100" for number in GPUS)
    yield f"| model | trained by | {counts} | largest in memory | largest in time |"
    yield "|---|---|---|---|---|---|---|"
    for model in MODELS:
        for name, method in METHODS.items():
            cells = {number: plan(model, method, number) for number in GPUS}
            # On one GPU the strategies are the same, and DeepSpeed is not used.
            shown = [
                "" if number == 1 and method.strategy != "auto" else str(cell)
                for number, cell in cells.items()
            ]
            last = cells[GPUS[-1]]
            largest, slowest = last.memory.at_peak[0].name, last.time.binding
            bound = f"{slowest.name} ({slowest.bound_by})"
            yield f"| {model} | {name} | {' | '.join(shown)} | {largest} | {bound} |"
    yield ""


def _one_gpu() -> Iterator[str]:
    yield "Qwen2.5-7B on one H100, with micro-batches of 4,096 tokens:"
    yield ""
    yield "| trained by | 128 sampled together | 32 | servers on another GPU | largest |"
    yield "|---|---|---|---|---|"
    for name, method in ON_ONE_GPU.items():
        own = [plan("7B", method, 1, budget=4096, max_concurrent=rows) for rows in (128, 32)]
        cells = [*own, plan("7B", replace(method, served=True), 1, budget=4096)]
        parts = ", ".join(one.name for one in cells[-1].memory.at_peak[:3])
        yield f"| {name} | {' | '.join(map(str, cells))} | {parts} |"
    yield ""


def draw(path: Path = PICTURE) -> None:
    """Draw memory and seconds by part for every model and method on 8 GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(MODELS), figsize=(11, 6.2), squeeze=False)
    parts = [
        ("weights", ("weights",)),
        ("gradients", ("gradients", "buckets", "copy of a bucket")),
        ("optimizer", ("optimizer", "copies")),
        (
            "activations",
            ("activations", "attention", "logits", "reading", "a layer", "gradient of"),
        ),
        ("keys and values", ("keys",)),
        ("gathered", ("gathered",)),
        ("others", ("",)),
    ]
    times = [("generation", "generation"), ("update", "update"), ("weight sync", "weight sync")]
    for column, model in enumerate(MODELS):
        cells = [plan(model, method, 8) for method in METHODS.values()]
        peaks = [_by_group(cell.memory, parts) for cell in cells]
        _bars(axes[0, column], [name for name, _ in parts], peaks)
        axes[0, column].axhline(limit_of(cells[0].setup.cluster) / 2**30, color="black", lw=0.8)
        axes[0, column].set_ylim(0, 2 * limit_of(cells[0].setup.cluster) / 2**30)
        axes[0, column].set_title(model, fontsize=9)
        seconds = [{name: cell.time[key] for name, key in times} for cell in cells]
        _bars(axes[1, column], [name for name, _ in times], seconds)
        axes[1, column].set_xticks(range(len(METHODS)), METHODS, rotation=90, fontsize=6)
        axes[0, column].set_xticks([])
    axes[0, 0].set_ylabel("GiB of a GPU at its peak", fontsize=8)
    axes[1, 0].set_ylabel("seconds of a rollout step", fontsize=8)
    for axis in axes.flat:
        axis.tick_params(axis="y", labelsize=7)
    for row in (0, 1):
        axes[row, 0].legend(fontsize=6)
    figure.suptitle("One rollout step on 8 x H100 (line: what a GPU has)", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})
    pyplot.close(figure)


def _by_group(
    memory: MemoryEstimate, groups: list[tuple[str, tuple[str, ...]]]
) -> dict[str, float]:
    """Return the GiB of each group of parts at the peak; a part is in the first that names it."""
    sizes = dict.fromkeys((name for name, _ in groups), 0.0)
    for part in memory.at_peak:
        name = next(name for name, starts in groups if part.name.startswith(starts))
        sizes[name] += part.bytes / 2**30
    return sizes


def _bars(axis: Any, names: list[str], columns: list[dict[str, float]]) -> None:
    below = [0.0] * len(columns)
    for name in names:
        heights = [column[name] for column in columns]
        axis.bar(range(len(columns)), heights, bottom=below, label=name, width=0.8)
        below = [one + other for one, other in zip(below, heights, strict=True)]


def main() -> None:
    """Replace what stands between the marks, and the picture."""
    page = PAGE.read_text()
    PAGE.write_text(MARKS.sub(lambda found: f"{found[1]}{sweeps()}\n{found[2]}", page))
    draw()


if __name__ == "__main__":
    main()
