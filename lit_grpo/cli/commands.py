"""The names that a command line may use: commands and bundled configs.

Imports nothing heavy, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMANDS = {
    "sft": "fine-tune a policy on worked answers (SFT), as the starting point for GRPO",
    "fit": "train a policy with GRPO",
    "validate": "evaluate a checkpoint on the validation prompts",
    "test": "evaluate a checkpoint on the test prompts",
    "prepare": "make training data by a recipe: sources, filters, splits, gold scores",
    "precompute": "score stored answers for prepare, by a judge or by a program",
    "analyze": "measure rows with scores: signal, agreement, lengths, duplicates, balance",
    "doctor": "check before a run: data, model, memory, disk, engine, credentials, judges",
    "plan": "estimate memory and seconds of a step by part, on GPUs that need not be here",
    "rewards": "sample and score a few prompts without training: signal, time and cost of a step",
    "judge-check": "check that the judges of a config answer and tell good answers from bad",
    "rescore": "score the logged completions of a run again with changed rewards and compare",
    "report": "draw runs, as stages of one training or compared, into a page and a picture",
    "checkpoints": "list the checkpoints of a run, verify them, go back to one, or export one",
    "wandb-sync": "send to wandb what a run has logged while it was offline",
}
ARGUMENTS = {
    "sft": ("[RUN]", "resume this run with its own config"),
    "fit": ("[RUN]", "resume this run with its own config"),
    "validate": ("[RUN]", "evaluate the newest checkpoint of this run with its own config"),
    "test": ("[RUN]", "evaluate the newest checkpoint of this run with its own config"),
    "analyze": ("DATA", "prepared data, a cache of gold scores, or a run"),
    "doctor": ("[RUN]", "use the config of this run"),
    "plan": ("[RUN]", "use the config of this run"),
    "rewards": ("[RUN]", "use the config of this run"),
    "judge-check": ("[RUN]", "use the config of this run"),
    "rescore": ("RUN", "the run whose completions are scored again"),
    "report": ("RUN ...", "one run, the stages of one training, or runs to compare"),
    "checkpoints": ("RUN", "the run whose checkpoints are meant"),
    "wandb-sync": ("RUN", "the run whose directory wandb/ has what was not sent"),
}
"""Command -> its first argument and what that is for, if it takes one."""
EXAMPLES = {
    "sft": ("--config quickstart_sft",),
    "fit": (
        "--config quickstart",
        "--config my.yaml --config more.yaml --model.group_size 16",
        "--config my.yaml --print_config",
        "runs/my/0",
    ),
    "validate": ("runs/my/0",),
    "test": ("--config my.yaml --ckpt_path runs/my/0/checkpoints/last.ckpt",),
    "prepare": (
        "--list",
        "--preset verifiable_only --out prepared",
        "--preset my_recipe.yaml --out prepared --only_cached --near_duplicates drop",
        "--preset curriculum --out warmup --sft",
    ),
    "precompute": (
        "--preset open_only --dry_run",
        "--preset my_recipe.yaml --cache gold",
        "--preset my_recipe.yaml --cache gold --processes 4",
    ),
    "analyze": (
        "prepared --min_signal 90 --picture prepared.png",
        "prepared --policy runs/warm/0/final --config my.yaml",
        "gold --json",
        "runs/my/0",
    ),
    "doctor": ("--config my.yaml", "--config my.yaml --probe"),
    "plan": (
        "--config my.yaml --gpus 8xH100 --nodes 2",
        "--config my.yaml --gpus 4xA100-40 --trainer.strategy fsdp2 --json",
        "--config my.yaml",
    ),
    "rewards": ("--config my.yaml --n 8",),
    "judge-check": ("--config my.yaml",),
    "rescore": ("runs/my/0 --config other_rewards.yaml --last 10",),
    "report": (
        "runs/my/0",
        "runs/my_sft/0 runs/my/0",
        "runs/my/0 runs/my/1 runs/my/2 --steps 60",
        "runs/my/0 --follow",
    ),
    "checkpoints": (
        "runs/my/0",
        "runs/my/0 --verify",
        "runs/my/0 --before_step 120 --recover",
        "runs/my/0 --export model",
    ),
    "wandb-sync": ("runs/my/0",),
}
"""Command -> arguments of examples."""
TRAINING = ("sft", "fit")
"""The commands that train and get a new run directory."""
RESUMING = (*TRAINING, "validate", "test")
"""The commands that load the last checkpoint of the run that they are given."""
REWARD_COMMANDS = ("rewards", "judge-check", "rescore")
"""The commands that try the rewards of a config, on one device."""
CHECKING = "doctor"
"""The command that checks a training run without starting it."""
PLANNING = "plan"
"""The command that estimates what a step of a training run will cost."""
WITHOUT_CONFIG = ("prepare", "precompute", "analyze", "report", "checkpoints", "wandb-sync")
"""The commands that take options of their own in place of the keys of a config."""


def _number(text: str) -> int | float:
    """Return a whole number or a fraction."""
    return int(text) if text.isdecimal() else float(text)


_RECIPE: dict[str, dict[str, Any]] = {
    "--preset": {
        "metavar": "NAME",
        "default": "open_only",
        "help": "the recipe: one of prepare --list, or a file; without it open_only",
    },
    "--data": {
        "action": "append",
        "default": [],
        "metavar": "SOURCE=FILE",
        "help": "other files for a source, separated by commas; may be given for each source",
    },
    "--cache": {
        "metavar": "DIR",
        "help": "the directory of gold scores; without it gold.cache of the recipe",
    },
    "--bad_rows": {
        "choices": ("refuse", "drop"),
        "default": "refuse",
        "metavar": "WHAT",
        "help": "refuse or drop rows that cannot be used, such as those without a prompt",
    },
}
"""The options of the commands that read a recipe."""

OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "prepare": {
        **_RECIPE,
        "--out": {"metavar": "DIR", "help": "the directory to write"},
        "--list": {
            "action": "store_true",
            "help": "show what the data of each recipe are made of",
        },
        "--only_cached": {
            "action": "store_true",
            "help": "keep only rows with gold scores, of every source, in place of refusing others",
        },
        "--holdout_size": {"type": int, "metavar": "N", "help": "prompts that are held out"},
        "--holdout": {
            "metavar": "FILE",
            "help": "hold out what this holdout_ids.json of other prepared data lists",
        },
        "--validation_size": {
            "type": _number,
            "metavar": "X",
            "help": "prompts for validation, or their fraction of those that are not held out",
        },
        "--seed": {"type": int, "metavar": "N", "help": "seed of the splits and of the order"},
        "--size": {
            "type": int,
            "metavar": "N",
            "help": "rows to train on, of all sources together by their weights",
        },
        "--duplicates": {
            "choices": ("drop", "report", "refuse"),
            "metavar": "WHAT",
            "help": "of rows with the same prompt: drop all but one, report them, or refuse",
        },
        "--near_duplicates": {
            "choices": ("drop", "report", "refuse", "ignore"),
            "metavar": "WHAT",
            "help": "the same of prompts that share most of their words; ignore does not look",
        },
        "--sft": {
            "action": "store_true",
            "help": "write pairs of prompt and completion for lit-grpo sft, with the same holdout",
        },
        "--json": {"action": "store_true", "help": "print the manifest in place of the table"},
    },
    "precompute": {
        **_RECIPE,
        "--prepared": {
            "metavar": "DIR",
            "help": "score the rows of these prepared data in place of those of the sources",
        },
        "--limit": {"type": int, "metavar": "N", "help": "only the first N rows of each source"},
        "--processes": {
            "type": int,
            "metavar": "N",
            "default": 1,
            "help": "how many processes share the work: each takes its part of the judge's limits",
        },
        "--dry_run": {
            "action": "store_true",
            "help": "only say what is missing, and the calls, tokens, dollars and hours for it",
        },
        "--json": {"action": "store_true", "help": "print JSON in place of tables and words"},
    },
    "analyze": {
        "--threshold": {
            "type": float,
            "metavar": "X",
            "help": "least difference of scores that ranks answers; without it 0.1, any for a run",
        },
        "--min_signal": {
            "type": float,
            "metavar": "PERCENT",
            "help": "exit code 1 if fewer rows than this percentage have signal",
        },
        "--split": {
            "metavar": "NAME",
            "default": "train",
            "help": "the split of prepared data; without it train",
        },
        "--tokenizer": {
            "metavar": "PATH",
            "help": "model or tokenizer for lengths in tokens; without it characters / 4",
        },
        "--picture": {
            "metavar": "FILE",
            "help": "draw spreads, pass rates, lengths and balance by source into a .png or .svg",
        },
        "--policy": {
            "metavar": "PATH",
            "help": "write this policy's pass rate on each row of prepared data as pass_rate",
        },
        "--samples": {
            "type": int,
            "metavar": "N",
            "default": 8,
            "help": "completions of the policy for a row; without it 8",
        },
        "--success": {
            "type": float,
            "metavar": "X",
            "default": 1.0,
            "help": "the sum of rewards from which a completion is right; without it 1",
        },
        "--config": {
            "action": "append",
            "default": [],
            "metavar": "FILE",
            "help": "config with the policy's engine, sampling, rewards and prompt format; "
            "--KEY VALUE overrides it",
        },
        "--json": {"action": "store_true", "help": "print JSON in place of the table"},
    },
    "doctor": {
        "--probe": {
            "action": "store_true",
            "default": False,
            "help": "Also sample and score a few prompts: signal, speed and time of the run.",
        },
        "--offline": {
            "action": "store_true",
            "default": False,
            "help": "Ask nobody: no judge, no server, no Hub.",
        },
    },
    "plan": {
        "--gpus": {
            "type": str | None,
            "help": "GPUs of a node, such as 8xH100; cpu measures this machine's. Null takes the "
            "devices of this machine.",
        },
        "--nodes": {"type": int, "default": 1, "help": "Number of nodes."},
        "--completion_tokens": {
            "type": float | None,
            "help": "Mean length of completions, for the seconds; null takes the longest.",
        },
        "--optimizer_bytes": {
            "type": float | None,
            "help": "Bytes of optimizer state per trained parameter, such as 2 for an 8-bit AdamW; "
            "null takes those of model.optimizer.",
        },
        "--json": {"action": "store_true", "default": False, "help": "Print JSON, not tables."},
        "--offline": {
            "action": "store_true",
            "default": False,
            "help": "Do not ask the Hub for the model's config or for data.",
        },
    },
    "rewards": {
        "--n": {"type": int, "default": 8, "help": "Number of prompts, in training order."}
    },
    "rescore": {
        "--last": {
            "type": int | None,
            "help": "Rescore only this many of the last rollout steps; null rescores all.",
        }
    },
    "report": {
        "--steps": {
            "type": int,
            "metavar": "N",
            "help": "draw and count only the first N steps of each run",
        },
        "--follow": {
            "action": "store_true",
            "help": "write the page again and again until the run has ended, or Ctrl-C",
        },
        "--every": {
            "type": float,
            "metavar": "SECONDS",
            "default": 10.0,
            "help": "how often --follow writes the page, and the page reloads itself",
        },
    },
    "checkpoints": {
        "--before_step": {
            "type": int,
            "metavar": "N",
            "help": "only checkpoints with fewer than N finished rollout steps",
        },
        "--verify": {
            "action": "store_true",
            "help": "read them all, compare them with what was written; exit code 1 if damaged",
        },
        "--latest": {"action": "store_true", "help": "print the path of the newest intact one"},
        "--recover": {
            "action": "store_true",
            "help": "let a resumed run go on from the newest intact one of these; the others stay",
        },
        "--export": {
            "metavar": "DIR",
            "help": "write the newest intact one of these as a Hugging Face model, like final/",
        },
        "--dry_run": {
            "action": "store_true",
            "help": "only say what --recover or --export would do",
        },
    },
    "wandb-sync": {
        "--include_online": {
            "action": "store_true",
            "help": "also runs that were logged online, of which wandb may have lost the end",
        },
    },
}
"""Command -> its arguments in addition to the keys of a config, if it takes one."""

REPORT_OUTPUT = """
One run is drawn into its report.html and curves.png. So are stages of one training: runs each of
which started from the model of the one before, such as an SFT run and the fit on its final/. Other
runs are drawn over each other, into a new comparison-1.html and .png (or 2, ...) of the last one.
The page needs no network. It has curves, events, completions, and an entry for a log."""

BUNDLED = Path(__file__).parent.parent / "configs"
RECIPES = Path("data")
"""The directory of recipes of training data among the configs."""


def bundled_configs() -> list[str]:
    """Return the names of the bundled configs, such as ``quickstart`` and ``presets/dapo``.

    Recipes of training data are no configs.
    """
    paths = (path.relative_to(BUNDLED).with_suffix("") for path in BUNDLED.rglob("*.yaml"))
    names = (path.as_posix() for path in paths if path.parent != RECIPES)
    return sorted(names, key=lambda name: (name.count("/"), name))


def examples(command: str) -> str:
    """Return the examples of a command, a line each."""
    return "\n".join(f"  lit-grpo {command} {arguments}" for arguments in EXAMPLES[command])


def usage(command: str) -> str:
    argument, _ = ARGUMENTS.get(command, ("", ""))
    options = "[OPTIONS]" if command in WITHOUT_CONFIG else "[--config FILE ...] [--KEY VALUE ...]"
    return " ".join(filter(None, ("lit-grpo", command, argument, options)))


def describe(command: str) -> str:
    """Return what a command does, what its first argument is, and examples, for its help."""
    purpose = COMMANDS[command]
    argument = "  {:<9}{}\n\n".format(*ARGUMENTS[command]) if command in ARGUMENTS else ""
    return (
        f"{purpose[0].upper()}{purpose[1:]}.\n\n{argument}"
        f"{_options(command)}examples:\n{examples(command)}\n"
        f"{REPORT_OUTPUT if command == 'report' else ''}"
    )


def _options(command: str) -> str:
    """Return the options of a command without keys, a line each."""
    if command not in WITHOUT_CONFIG:
        return ""
    named = {
        f"{name} {one.get('metavar', '')}": one["help"] for name, one in OPTIONS[command].items()
    }
    width = max(17, max(map(len, named)) + 1)
    lines = [f"  {name:<{width}}{meaning}" for name, meaning in named.items()]
    return "\n".join(["options:", *lines]) + "\n\n"
