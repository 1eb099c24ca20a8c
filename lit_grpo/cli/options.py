"""The options of each command that has some, in addition to the keys of a config.

Imports nothing heavy, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

from typing import Any


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
            "help": "keep only rows with gold scores, of every source, instead of refusing others",
        },
        "--holdout_size": {"type": int, "metavar": "N", "help": "prompts that are held out"},
        "--holdout": {
            "metavar": "FILE",
            "help": "hold out what this holdout_ids.json of other prepared data lists",
        },
        "--release_holdout": {
            "action": "store_true",
            "help": "allow to train on rows that the directory to write holds out so far",
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
        "--json": {"action": "store_true", "help": "print the manifest instead of the table"},
    },
    "precompute": {
        **_RECIPE,
        "--prepared": {
            "metavar": "DIR",
            "help": "score the rows of these prepared data instead of those of the sources",
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
            "help": "only report what is missing, and its calls, tokens, dollars and hours",
        },
        "--json": {"action": "store_true", "help": "print JSON instead of tables and text"},
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
            "help": "write this policy's pass rate on each row of prepared data as pass_rate, and "
            "whether its scores differ as has_gradient",
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
            "default": None,
            "help": "the sum of rewards from which a completion is right; without it 1, in the "
            "sources whose sums are all 0 or 1",
        },
        "--config": {
            "action": "append",
            "default": [],
            "metavar": "FILE",
            "help": "config with the policy's engine, sampling, rewards and prompt format; "
            "--KEY VALUE overrides it",
        },
        "--json": {"action": "store_true", "help": "print JSON instead of the table"},
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
            "help": "Contact no judge, no server and not the Hub.",
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
            "help": "let a resumed run go on from the newest intact one, a healthy one if there "
            "is any; it replaces later ones",
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
"""Command -> its options, in addition to the keys of a config if it takes one."""


def list_options(command: str) -> str:
    """Return the options of a command, a line each."""
    named = {
        f"{name} {one.get('metavar', '')}": one["help"] for name, one in OPTIONS[command].items()
    }
    width = max(17, max(map(len, named)) + 1)
    lines = [f"  {name:<{width}}{meaning}" for name, meaning in named.items()]
    return "\n".join(["options:", *lines]) + "\n\n"
