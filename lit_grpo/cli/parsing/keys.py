"""The keys of a config that people set, with their defaults and meanings."""

from __future__ import annotations

from lit_grpo.cli.commands import CHECKING, PLANNING, TRAINING

SECTIONS = ("model", "data", "trainer", "seed_everything", "run_dir", "ckpt_path")
"""Keys at the top level of a config."""

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
    "trainer.callbacks": ("null", "timing, alerts, and settings of what every run has"),
    "seed_everything": ("0", "seed of the run"),
    "run_dir": ("runs/NAME/N", "directory of all files"),
    "ckpt_path": (
        "null",
        "checkpoint to load; last is the newest one in run_dir, auto that one if any, best that "
        "by a callback's monitor",
    ),
    "allow_changes": ("false", "resume with settings that make it a different run"),
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
ONLY_TRAINING = {
    "model.optimizer.lr",
    "model.lr_schedule",
    "model.objective.kl.coef",
    "model.update.max_tokens_per_micro_batch",
    "data.prompts_per_step",
    "trainer.max_steps",
    "trainer.val_check_interval",
    "allow_changes",
}


def main_keys(command: str) -> dict[str, tuple[str, str]]:
    """Return the keys of a command that people set, with defaults and meanings."""
    left_out = ONLY_GRPO if command == "sft" else ONLY_SFT
    if command not in (*TRAINING, CHECKING, PLANNING):
        left_out = left_out | ONLY_TRAINING
    keys = {key: value for key, value in KEYS.items() if key not in left_out}
    if command == "sft":
        keys["model.optimizer.lr"] = ("2e-5", keys["model.optimizer.lr"][1])
    return keys
