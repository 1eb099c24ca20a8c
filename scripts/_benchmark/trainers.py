"""The trainers to compare, each run as a user would run it and stepped by a `StepTimer`.

A trainer's libraries are imported in its own process only.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from _benchmark.bare import bare_update_pass
from _benchmark.processes import StepTimer
from _benchmark.workloads import Workload, varied_reward

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LitTask:
    """Settings of one run of this project.

    Args:
        directory: Parent of the run directory.
        config: Overrides of the quickstart's config.
    """

    directory: Path
    config: Config


def lit_grpo(timer: StepTimer, task: LitTask) -> None:
    """Run this project's command line with the quickstart's callbacks and files."""
    from lightning.pytorch import Callback

    from lit_grpo.cli.app import execute, import_plugins
    from lit_grpo.cli.command_line import CommandLine
    from lit_grpo.cli.parsing.invocation import read_invocation
    from lit_grpo.runs.run_log import silence_chatter

    class TimeSteps(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            timer.next_step()

        def on_stage_end(self, trainer: Any, module: Any, stage: Any) -> None:
            if stage.micro_batch is None:  # micro-batches are parts of the update
                timer.add(stage.name, stage.seconds)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            timer.set_mean_length(outputs["metrics"]["completions/mean_length"])

        def on_train_end(self, *_: Any) -> None:
            timer.next_step()

    silence_chatter()
    import_plugins()
    task.directory.mkdir(parents=True, exist_ok=True)
    overrides = task.directory / "overrides.yaml"
    overrides.write_text(yaml.safe_dump(task.config))
    run_dir = str(task.directory / "run")
    arguments = ["--config", "quickstart", "--config", str(overrides), "--run_dir", run_dir]
    command = CommandLine("fit", read_invocation(arguments), run_dir)
    timer.evaluate = lambda: held_out_accuracy(command.model.policy)
    command.trainer.callbacks.insert(0, TimeSteps())  # type: ignore[attr-defined]
    execute(command)


def step_config(workload: Workload, model: Path, rows: int, num_steps: int, dtype: str) -> Config:
    """Return the overrides for steps of a workload with micro-batches of ``rows`` rows."""
    return {
        "trainer": {"max_steps": num_steps, "limit_val_batches": 0},
        "model": {
            "policy": {"path": str(model), "dtype": dtype},
            "group_size": workload.group_size,
            "sampling": {"max_tokens": workload.max_tokens},
            "rewards": [
                {
                    "class_path": "FunctionReward",
                    "init_args": {"function": f"{varied_reward.__module__}:varied_reward"},
                }
            ],
            "update": {"max_tokens_per_micro_batch": rows * workload.row_tokens},
            "optimizer": {"class_path": "AdamW", "init_args": {"lr": 1e-6, "weight_decay": 0.0}},
            "lr_schedule": "constant",
            "warmup_steps": 0,
        },
        "data": {
            "class_path": "PromptData",
            "init_args": {
                "train": str(model / "train.jsonl"),
                "validation_size": 0,
                "prompts_per_step": workload.num_prompts,
                "require_answer": False,
            },
        },
    }


@dataclass(frozen=True, kw_only=True)
class TrlTask:
    """Settings of one run of TRL.

    Args:
        rows: The dataset; the workload's ``train.jsonl`` when None.
        reward: A reward function with TRL's signature, importable in another process.
        settings: Arguments of ``GRPOConfig``.
    """

    model: Path
    directory: Path
    reward: Any
    dtype: str = "float32"
    rows: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def trl(timer: StepTimer, task: TrlTask) -> None:
    """Run TRL's GRPOTrainer, without the logging and saving that it does by default."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    trainer_class, callback = timed_trl(timer)
    trainer = trainer_class(
        model=model,
        reward_funcs=task.reward,
        args=trl_config(task),
        train_dataset=Dataset.from_list(task.rows or read_rows(task.model / "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    timer.evaluate = lambda: held_out_accuracy(ModelAndTokenizer(model, tokenizer))
    trainer.train()


def timed_trl(timer: StepTimer) -> tuple[Any, Any]:
    """Return a GRPOTrainer class that times its stages, and a callback that times its steps.

    What the trainer computes is unchanged.
    """
    from transformers import TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    update_ended = 0.0

    class Timed(GRPOTrainer):
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with timer.stage("generation"):
                generated = super()._generate(*args, **kwargs)
            lengths = [len(ids) for ids in generated[1]]
            timer.set_mean_length(sum(lengths) / len(lengths))
            return generated

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            with timer.stage("reward"):
                return super()._calculate_rewards(*args, **kwargs)

        def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super()._prepare_inputs(*args, **kwargs)
            self.update_began = time.perf_counter()
            return prepared

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal update_ended
            loss = super().training_step(*args, **kwargs)  # type: ignore[no-untyped-call]
            update_ended = time.perf_counter()
            timer.add("update", update_ended - self.update_began)
            return loss

    class TimeSteps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            timer.next_step()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            timer.add("update", time.perf_counter() - update_ended)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            timer.next_step()

    return Timed, TimeSteps()


def trl_config(task: TrlTask) -> Any:
    """Return TRL's config without gradient checkpointing and bfloat16, which it has by default.

    The other trainers use neither.
    """
    from trl.trainer.grpo_config import GRPOConfig

    return GRPOConfig(
        output_dir=str(task.directory),
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **task.settings,
    )


def step_settings(workload: Workload, rows: int, num_steps: int) -> dict[str, Any]:
    """Return TRL's counterpart of `step_config`."""
    return {
        "max_steps": num_steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": workload.num_rows // rows,
        "num_generations": workload.group_size,
        "max_completion_length": workload.max_tokens,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class ModelAndTokenizer:
    """Another trainer's model, in the form that this project's engine samples from."""

    model: Any
    tokenizer: Any


def held_out_accuracy(policy: Any) -> float:
    """Return the greedy accuracy on the quickstart's held-out sums."""
    from lit_grpo.data import AdditionData
    from lit_grpo.rollout import HFEngine, Sampling
    from lit_grpo.training import Evaluation
    from lit_grpo.training.metrics import Metrics
    from lit_grpo.types import Prompt

    rows = [row.columns for row in AdditionData(validation_size=512).rows("validation")]
    prompts = [
        Prompt(
            id=row["prompt"],
            text=row["prompt"],
            token_ids=tuple(policy.tokenizer(row["prompt"])["input_ids"]),
            answer=row["answer"],
        )
        for row in rows
    ]
    engine, metrics, evaluation = HFEngine(), Metrics(), Evaluation()
    engine.load_weights(policy, 0)
    with evaluation.suite:
        evaluation.add_metrics(metrics, engine, prompts, Sampling(max_tokens=6), seed=0)
    return metrics.merged()["val/accuracy"]


@dataclass(frozen=True, kw_only=True)
class BareTask:
    """Settings of the bare update."""

    workload: Workload
    model: Path
    micro_batch_rows: int
    dtype: str


def bare_update(timer: StepTimer, task: BareTask) -> None:
    """Run the bare update over as many tokens as an update has to process."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    workload = task.workload
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype))
    model.to(device)  # type: ignore[arg-type]
    model.train()
    ids = torch.randint(2, model.config.vocab_size, (workload.num_rows, workload.packed_row_tokens))
    while True:
        timer.next_step()
        with timer.stage("update"):
            bare_update_pass(
                model,
                ids.to(device),
                num_targets=workload.max_tokens,
                micro_batch_rows=task.micro_batch_rows,
            )
            if device == "cuda":
                torch.cuda.synchronize()
