"""The commands, what their help says, and the names of the bundled configs.

Imports nothing heavy, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path

from lit_grpo.cli.options import list_options

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
    "analyze": (
        "DATA",
        "prepared data, a cache of gold scores, a run, or a .parquet of completions",
    ),
    "doctor": ("[RUN]", "use the config of this run"),
    "plan": ("[RUN]", "use the config of this run"),
    "rewards": ("[RUN]", "use the config of this run"),
    "judge-check": ("[RUN]", "use the config of this run"),
    "rescore": ("RUN", "the run whose completions are scored again"),
    "report": ("RUN ...", "one run, the stages of one training, or runs to compare"),
    "checkpoints": ("RUN", "the run with the checkpoints"),
    "wandb-sync": ("RUN", "the run with unsent data in wandb/"),
}
"""Command -> its first argument and what that is for, if it takes one."""
OTHER_NAMES = {
    **dict.fromkeys(("train", "grpo", "run"), "fit"),
    **dict.fromkeys(("resume", "continue"), "fit RUN"),
    **dict.fromkeys(("warmup", "finetune"), "sft"),
    **dict.fromkeys(("eval", "evaluate"), "validate"),
    **dict.fromkeys(("export", "merge"), "checkpoints RUN --export DIR"),
    **dict.fromkeys(("plot", "show"), "report RUN"),
    "check": "doctor",
}
"""Names that a command has elsewhere, or that one might guess -> what to write here."""
EXAMPLES = {
    "sft": ("--config quickstart_sft",),
    "fit": (
        "--config debug",
        "--config debug --model.policy.path Qwen/Qwen2.5-0.5B-Instruct",
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
OWN_EXIT_CODES = {
    "precompute": {
        4: "scores are still missing: run the same command again; or the judge's budget is spent, "
        "by all runs on this cache: raise limits.max_cost_usd"
    },
    "analyze": {
        1: "fewer rows have signal than --min_signal, or a reward fails on every completion of "
        "--policy",
        4: "completions of --policy have no score because of a failure; the data are unchanged",
    },
    "doctor": {1: "a check failed"},
    "plan": {1: "a step needs more memory than there is"},
    "rewards": {
        1: "a reward gives no completion a value, except by abstaining, or so many have none that "
        "a run would stop"
    },
    "judge-check": {
        1: "a judge does not tell good answers from bad",
        2: "a judge cannot be asked",
    },
    "rescore": {
        1: "a reward gives no completion a value, except by abstaining",
        4: "a judge's budget is spent before all completions are scored",
    },
    "checkpoints": {1: "a checkpoint is damaged"},
    "wandb-sync": {1: "wandb has not sent everything"},
}
"""Command -> exit code -> what it means beyond `lit_grpo.stopping.ExitCode`."""
TRAINING = ("sft", "fit")
"""The commands that train and get a new run directory."""
EVALUATING = ("validate", "test")
RESUMING = (*TRAINING, *EVALUATING)
"""The commands that load the last checkpoint of the run that they are given."""
REWARD_COMMANDS = ("rewards", "judge-check", "rescore")
"""The commands that try the rewards of a config, on one device."""
CHECKING = "doctor"
"""The command that checks a training run without starting it."""
PLANNING = "plan"
"""The command that estimates what a step of a training run will cost."""
WITHOUT_CONFIG = ("prepare", "precompute", "analyze", "report", "checkpoints", "wandb-sync")
"""The commands that take their own options instead of config keys."""

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

    Recipes of training data are not configs.
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
    options = list_options(command) if command in WITHOUT_CONFIG else ""
    return (
        f"{purpose[0].upper()}{purpose[1:]}.\n\n{argument}"
        f"{options}examples:\n{examples(command)}\n"
        f"{REPORT_OUTPUT if command == 'report' else ''}"
    )
