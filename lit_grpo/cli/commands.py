"""The names that a command line may use: commands and bundled configs.

Imports nothing heavy, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path

COMMANDS = {
    "sft": "fine-tune a policy on worked answers (SFT), as the starting point for GRPO",
    "fit": "train a policy with GRPO",
    "validate": "evaluate a checkpoint on the validation prompts",
    "test": "evaluate a checkpoint on the test prompts",
    "rewards": "sample and score a few prompts without training: signal, time and cost of a step",
    "judge-check": "check that the judges of a config answer and tell good answers from bad",
    "rescore": "score the logged completions of a run again with changed rewards and compare",
    "report": "draw the curves of one or more runs and print a summary",
}
TRAINING = ("sft", "fit")
"""The commands that train and get a new run directory."""
RESUMING = (*TRAINING, "validate", "test")
"""The commands that load the last checkpoint of the run that they are given."""
REWARD_COMMANDS = ("rewards", "judge-check", "rescore")
"""The commands that try the rewards of a config, on one device."""

BUNDLED = Path(__file__).parent.parent / "configs"


def bundled_configs() -> list[str]:
    """Return the names of the bundled configs, such as ``quickstart`` and ``presets/dapo``."""
    paths = (path.relative_to(BUNDLED).with_suffix("") for path in BUNDLED.rglob("*.yaml"))
    return sorted((path.as_posix() for path in paths), key=lambda name: (name.count("/"), name))
