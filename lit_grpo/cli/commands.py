"""The names that a command line may use: commands and bundled configs.

Imports nothing heavy, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path

COMMANDS = {
    "sft": "warm a policy up on worked answers, for GRPO to start from",
    "fit": "train a policy with GRPO",
    "validate": "measure a checkpoint on the validation prompts",
    "test": "measure a checkpoint on the test prompts",
    "rewards": "sample and score a few prompts without training: signal, time and cost of a step",
    "judge-check": "ask the judges of a config: do they answer and tell good from bad",
    "rescore": "score the logged completions of a run again under changed rewards and compare",
    "report": "draw the curves of one or more runs and print a summary",
}
TRAINING = ("sft", "fit")
"""The commands that write into a run directory."""
MEASURING = ("rewards", "judge-check", "rescore")
"""The commands that try the rewards of a config, on one device."""

BUNDLED = Path(__file__).parent.parent / "configs"


def bundled_configs() -> list[str]:
    """Return the names of the bundled configs, such as ``quickstart`` and ``presets/dapo``."""
    paths = (path.relative_to(BUNDLED).with_suffix("") for path in BUNDLED.rglob("*.yaml"))
    return sorted((path.as_posix() for path in paths), key=lambda name: (name.count("/"), name))
