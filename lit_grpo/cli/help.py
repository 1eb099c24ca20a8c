"""The help of a command: the keys that people set, or with ``--help=all`` every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, capture_parser
from rich.table import Table

from lit_grpo.cli.command_line import OPTIONS, CommandLine
from lit_grpo.cli.commands import describe, usage
from lit_grpo.cli.configs import Invocation, read_config
from lit_grpo.runs.tables import open_console

KEYS = {
    "model.policy.path": ("required", "directory or Hub id of the model to start from"),
    "model.policy.lora": (
        "null",
        "adapter to train, {rank: 16, alpha: 32}; null trains all weights",
    ),
    "model.rewards": ("required", "'[MathReward]', or a list of classes, functions and judges"),
    "model.target_column": ("null", "column with the text to imitate; null takes the gold answer"),
    "model.group_size": ("8", "completions per prompt"),
    "model.sampling.temperature": ("1.0", "sampling temperature"),
    "model.sampling.max_tokens": ("256", "longest completion"),
    "model.engine": (
        "HFEngine",
        "VLLMEngine, VLLMServerEngine, SGLangEngine; --config engines/vllm",
    ),
    "model.optimizer.lr": (
        "1e-6",
        "learning rate of AdamW; with LoRA about 10 times more",
    ),
    "model.lr_schedule": ("constant", "constant, linear or cosine"),
    "model.objective.kl.coef": ("0.0", "weight of the KL divergence from the initial policy"),
    "model.update.max_tokens_per_micro_batch": ("16384", "lower it when memory is short"),
    "data": ("required", "PromptData for your files; AdditionData, RubricData, or your own"),
    "data.train": ("null", "jsonl, parquet or csv file, or Hub dataset id"),
    "data.validation": ("null", "the same for validation; or set data.validation_size to 0.1"),
    "data.prompts_per_step": ("64", "prompts per step, over all processes"),
    "data.chat": ("false", "format prompts with the model's chat template"),
    "trainer.max_steps": ("-1", "optimizer steps of the run; -1 never ends"),
    "trainer.val_check_interval": ("null", "steps between validations"),
    "trainer.devices": ("auto", "GPUs; with trainer.strategy ddp several"),
    "trainer.precision": ("null", "32-true or bf16-mixed; null is 32-true"),
    "trainer.callbacks": ("null", "checkpoints, timing, warnings, breaker, wandb"),
    "seed_everything": ("0", "seed of the run"),
    "run_dir": ("runs/NAME/N", "directory of all files"),
}
"""Key -> its default and meaning."""
ONLY_SFT = {"model.target_column"}
ONLY_GRPO = {
    "model.rewards",
    "model.group_size",
    "model.sampling.temperature",
    "model.engine",
    "model.objective.kl.coef",
    "model.update.max_tokens_per_micro_batch",
}


def main_keys(command: str) -> dict[str, tuple[str, str]]:
    """Return the keys of a command that people set, with defaults and meanings."""
    left_out = ONLY_GRPO if command == "sft" else ONLY_SFT
    keys = {key: value for key, value in KEYS.items() if key not in left_out}
    if command == "sft":
        keys["model.optimizer.lr"] = ("2e-5", keys["model.optimizer.lr"][1])
    return keys


def print_help(command: str) -> None:
    """Print what a command does, examples, and the keys that people set."""
    print(f"usage: {usage(command)}\n\n{describe(command)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "default", "meaning"):
        table.add_column(column, no_wrap=column == "key")
    for name, settings in OPTIONS.get(command, {}).items():
        table.add_row(name.lstrip("-"), str(settings.get("default", "null")), settings["help"])
    for key, (default, meaning) in main_keys(command).items():
        table.add_row(key, default, meaning)
    open_console().print(table)
    print(
        f"\nA file holds the same keys as YAML. lit-grpo {command} --help=all lists every key, "
        "with --config\nalso those of the classes in it. --print_config prints the whole config."
    )


def print_all_keys(command: str, invocation: Invocation) -> None:
    """Print every key of a command, and those of the classes that its config files name."""
    parser = capture_parser(lambda: CommandLine(command, invocation, "runs/NAME/N"))
    _name_groups_by_key(parser)
    parser.print_help()
    for key, class_path in _classes_in(invocation):
        with suppress(SystemExit):
            parser.parse_args([f"--{key}.help={class_path}"])


def _name_groups_by_key(parser: ArgumentParser) -> None:
    """Replace titles, which are the first lines of docstrings, with the key of the group."""
    for group in parser._action_groups:
        parents = Counter(action.dest.rpartition(".")[0] for action in group._group_actions)
        if group.title == "options" or not parents:
            continue
        ((common, _),) = parents.most_common(1)
        group.title = common or group._group_actions[0].dest


def _classes_in(invocation: Invocation) -> Iterator[tuple[str, str]]:
    """Yield the keys that take a class, with each class that a config file names."""
    paths = (one.removeprefix("--config=") for one in invocation.arguments if "--config=" in one)
    seen = set()
    for path in paths:
        config = read_config(Path(path))
        for key in ("trainer.callbacks", "model.engine", "model.rewards", "data"):
            for found in _named(_value(config, key.split("."))):
                if (key, found) not in seen:
                    seen.add((key, found))
                    yield key, found


def _value(config: Any, path: list[str]) -> Any:
    for name in path:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _named(value: Any) -> Iterator[str]:
    """Yield the classes of a value: one, or those of a list."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, Mapping) and "class_path" in one:
            yield str(one["class_path"])
        elif isinstance(one, str):
            yield one
