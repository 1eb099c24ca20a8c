"""The smallest config that can be trained."""

from __future__ import annotations

from tiny import LLAMA

BASE = {
    "trainer": {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False},
    "model": {
        "policy": {"architecture": LLAMA},
        "rewards": ["MathReward"],
        "group_size": 2,
        "sampling": {"max_tokens": 3},
        "evaluation": {"before_training": False},
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {
            "num_digits": 1,
            "prompts_per_step": 2,
            "train_size": 8,
            "validation_size": 2,
        },
    },
}
