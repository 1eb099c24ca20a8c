"""Write an entry for an experiment log, in Markdown: the settings of a run and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lit_grpo.runs.files.config import argument, read_config
from lit_grpo.runs.files.event_log import EventKind, read_events
from lit_grpo.runs.report.history import ACCURACY, Run
from lit_grpo.runs.report.page.diagnosis import Diagnosis
from lit_grpo.runs.report.summary import UNKNOWN, change, num_tokens, running_time, steps_cell

MODEL = ("model_type", "hidden_size", "num_hidden_layers")
"""The settings that the entry shows of a model built from its architecture."""
DATA = ("train", "num_digits", "train_size", "prompts_per_step", "batch_size")
SETTINGS = {
    "group_size": ("model", "group_size"),
    "lr": ("model", "optimizer", "lr"),
    "lr_schedule": ("model", "lr_schedule"),
    "surrogate": ("model", "objective", "surrogate"),
    "aggregation": ("model", "objective", "aggregation"),
    "kl.coef": ("model", "objective", "kl", "coef"),
    "baseline": ("model", "advantage", "baseline"),
    "deviation": ("model", "advantage", "deviation"),
    "epochs": ("model", "update", "epochs"),
    "minibatches": ("model", "update", "minibatches"),
    "temperature": ("model", "sampling", "temperature"),
    "max_tokens": ("model", "sampling", "max_tokens"),
    "lora.rank": ("model", "policy", "lora", "rank"),
    "max_steps": ("trainer", "max_steps"),
    "seed": ("model", "seed"),
}
"""Main hyper-parameters, and their places in a config."""
RESULTS = {
    "Held-out accuracy": ACCURACY,
    "Reward": "reward/mean",
    "SFT loss": "sft/loss",
}


def log_entry(run: Run, diagnosis: Diagnosis) -> str:
    """Return a heading and a list of facts; facts that the run did not record are left out."""
    times = [event.time[:16].replace("T", " ") for event in read_events(run.path)]
    facts = {
        "Date": " to ".join(dict.fromkeys([times[0], times[-1]])) if times else "",
        **_setup(read_config(run.path / "config.yaml")),
        **_outcome(run, diagnosis),
    }
    lines = [f"- **{name}:** {' '.join(fact.split())}" for name, fact in facts.items() if fact]
    return "\n".join([f"## {run.label}", "", *lines, "- **Notes:** "])


def _setup(config: Any) -> dict[str, str]:
    policy = argument(config, "model", "policy")
    architecture = argument(policy, "architecture")
    built = _join({name: argument(architecture, name) for name in MODEL})
    data = argument(config, "data")
    values = {name: argument(data, name) for name in DATA}
    settings = {name: argument(config, *keys) for name, keys in SETTINGS.items()}
    return {
        "Model": _code(argument(policy, "path")) or (f"new, {built}" if built else ""),
        "Data": ", ".join(filter(None, [_class_name(config, "data"), _join(values)])),
        "Rewards": ", ".join(_rewards(argument(config, "model", "rewards"))),
        "Settings": _join(settings),
    }


def _outcome(run: Run, diagnosis: Diagnosis) -> dict[str, str]:
    tokens = num_tokens(run)
    return {
        "Steps": f"{steps_cell(run)} in {running_time([run])}"
        + (f", {tokens} tokens" if tokens != UNKNOWN else ""),
        **{
            f"{name} {run.when(metric)}".strip(): change(run, metric)
            for name, metric in RESULTS.items()
            if run.has(metric)
        },
        "End": diagnosis.end,
        "Alerts": _counts(diagnosis, "alert"),
        "Warnings": _counts(diagnosis, "warning"),
        "Failures": " ".join(diagnosis.failures),
    }


def _counts(diagnosis: Diagnosis, kind: EventKind) -> str:
    """Return ``truncated × 2, empty × 1`` of the alerts or the warnings."""
    found = [cause for cause in diagnosis.causes if cause.kind == kind]
    return ", ".join(f"{cause.name} × {cause.num_events}" for cause in found)


def _rewards(rewards: Any) -> Iterator[str]:
    """Yield the names of reward classes, with weights other than 1."""
    for reward in rewards if isinstance(rewards, list) else []:
        name = reward.get("class_path") if isinstance(reward, Mapping) else reward
        weight = argument(reward, "weight")
        yield str(name).rpartition(".")[2] + (f" × {weight}" if weight not in (None, 1) else "")


def _class_name(config: Any, key: str) -> str:
    found = config.get(key) if isinstance(config, Mapping) else None
    path = found.get("class_path") if isinstance(found, Mapping) else None
    return str(path).rpartition(".")[2] if path else ""


def _join(values: Mapping[str, Any]) -> str:
    """Return ``lr 0.0007, seed 0`` of the values that are set."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _code(value: Any) -> str:
    return f"`{value}`" if value else ""
