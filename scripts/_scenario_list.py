"""The trainings of ``scenarios.py``: what is wrong with each, and how it must end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

ROOT = Path(__file__).parent.parent
VLLM = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"), "bin", "python")
SERVER = ROOT / "configs" / "engines" / "vllm_server_cpu.yaml"
NUM_STEPS = 8
SOME = -1
SMALL_DISK = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=2m tmpfs run && "$@"; code=$?; cp -r run kept; exit $code',
    "sh",
)


class Process(Protocol):
    """What is used of a ``Popen``."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, signum: signal.Signals) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Running:
    """A training that is running."""

    process: Process
    run: Path

    def wait_for_rows(self, number: int) -> None:
        """Wait until so many rollout steps are logged, or the process has ended."""
        path = self.run / "metrics.csv"
        while self.process.poll() is None:
            if path.exists() and len(path.read_text().splitlines()) > number:
                return
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training with something wrong, and how it must end."""

    title: str
    cause: str
    """Name in the table of causes."""
    event: str = ""
    """Kind of an event of the run that has this cause; empty if the run has none of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the config that differ from the base."""
    says: str
    """Pattern of the first line that is not said of every run: it names the cause."""
    ends: str = ""
    """Pattern of a later line; a number in a group of it is that of the steps that are kept."""
    exit_code: int = 0
    keeps: int | None = NUM_STEPS
    """Finished rollout steps of the newest intact checkpoint; None if there is no checkpoint, and
    `SOME` if a clock decides. The completions of all these steps are kept, and ``final/`` is there
    if and only if the exit code is 0."""
    shows_traceback: bool = False
    """Whether the traceback of the user's code belongs to the message."""
    prepare: Callable[[Path], None] | None = None
    """Writes files into the working directory."""
    drive: Callable[[Running], None] | None = None
    """Does something to the training while it runs."""
    then: Callable[[Path], None] | None = None
    """Does something to the run directory when the training has ended; it is resumed then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    """A file without which the scenario is left out."""
    command: tuple[str, ...] = ()
    """Goes before the command of the training."""
    judge: Mapping[str, Any] | None = None
    """Behaviour of a judge that scores the run."""


BASE: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "callbacks": [
            {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1}},
            {"class_path": "ZeroRewardBreaker", "init_args": {"alert_after": 2, "stop_after": 4}},
        ],
    },
    "model": {
        "policy": {
            "architecture": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "initializer_range": 0.1,
            }
        },
        "rewards": [{"class_path": "_scenario_code.ShareOfDigits"}],
        "group_size": 4,
        "sampling": {"max_tokens": 6, "stop_token_ids": list(range(48))},
        "outage": {"first_pause_seconds": 0.2, "give_up_after_seconds": 2},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.001}},
        "evaluation": {"before_training": False},
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {"num_digits": 1, "validation_size": 8, "prompts_per_step": 8},
    },
}


def reward(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"_scenario_code.{name}", "init_args": arguments}


def callback(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return the callbacks of the base, and one more, which acts before them."""
    own = {"class_path": f"_scenario_code.{name}", "init_args": arguments}
    return {"trainer.callbacks": [own, *BASE["trainer"]["callbacks"]]}


def send(signum: signal.Signals) -> Callable[[Running], None]:
    """Return what sends a signal in the fourth step or later."""

    def drive(running: Running) -> None:
        running.wait_for_rows(3)
        running.process.send_signal(signum)

    return drive


def flip_a_byte(run: Path) -> None:
    path = (run / "checkpoints" / "last.ckpt").resolve()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_null_answers(directory: Path) -> None:
    rows = ['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+2=", "answer": null}'] * 8
    (directory / "rows.jsonl").write_text("\n".join(rows))


def with_wandb(name: str) -> dict[str, Any]:
    """Return a run that logs to wandb, whose service gets a signal."""
    settings = callback("SignalToWandb", name=name)
    teardown = {"class_path": "WandbTeardown", "init_args": {"timeout_seconds": 5}}
    settings["trainer.callbacks"].append(teardown)
    arguments = {"project": "scenarios", "offline": True, "save_dir": "."}
    return settings | {"trainer.logger": {"class_path": "WandbLogger", "init_args": arguments}}


def with_server(**supervision: Any) -> dict[str, Any]:
    """Return a run that samples with a vLLM server on the CPU."""
    engine = yaml.safe_load(SERVER.read_text())["model"]["engine"]
    engine["init_args"]["launch"]["python"] = str(VLLM)
    engine["init_args"]["supervision"] = supervision
    architecture = BASE["model"]["policy"]["architecture"]
    larger = architecture | {"hidden_size": 64, "max_position_embeddings": 64}  # heads of 32
    return {"model.engine": engine, "model.policy": {"architecture": larger}}


def watchdog(**arguments: Any) -> dict[str, Any]:
    """Return a watchdog that waits for seconds only."""
    times = {"min_seconds": 1.0, "first_seconds": 3.0}
    return {"class_path": "StallWatchdog", "init_args": times | arguments}


LONG = {"trainer.max_steps": 10_000, "model.optimizer.init_args.lr": 1e-6}
"""A clock or a signal ends it before the policy has changed."""
EVERY_STEP = {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1, "keep_last": 99}}

SCENARIOS = (
    Scenario(
        title="wrong credentials of the judge",
        cause="judge_refused",
        judge={"is_denied": True},
        says=r"answered 401 for model",
        exit_code=2,
        keeps=None,
    ),
    Scenario(
        title="the judge dies at step 20",
        cause="score_outage",
        event="stop",
        judge={},
        settings=LONG | callback("JudgeDown", step=20),
        says=r"reward 'judge' gave no value for prompt .* unavailable: Error code: 503",
        ends=r"Stopped because too many scores are missing: 32 of the 32 rows",
        exit_code=4,
        keeps=20,
    ),
    Scenario(
        title="the inference server dies at step 20",
        cause="engine_outage",
        event="alert",
        settings=with_server() | callback("ServerDown", step=20) | {"trainer.max_steps": 24},
        says=r"retrying: the server does not answer \(its process may have died\): POST /pause: ",
        ends=r"Server .* was stopped: .* Restart 1 of 3",
        keeps=24,
        needs=VLLM,
    ),
    Scenario(
        title="the inference server dies and may not be restarted",
        cause="engine_outage",
        event="stop",
        settings=with_server(max_restarts=0) | callback("ServerDown", step=3),
        says=r"retrying: the server does not answer \(its process may have died\): POST /pause: ",
        ends=r"Stopped: the inference server at .* is still unhealthy",
        exit_code=5,
        keeps=3,
        needs=VLLM,
    ),
    Scenario(
        title="a constant scorer",
        cause="equal_rewards",
        event="alert",
        settings={"model.rewards": [reward("Constant")], "trainer.max_steps": 12},
        says=r"All advantages are 0: inside each group all rewards are equal",
        ends=r"Rollout steps in a row like this one: 10\.",
        keeps=12,
    ),
    Scenario(
        title="a scorer that never matches",
        cause="no_reward",
        event="stop",
        settings={"model.rewards": [reward("Never")]},
        says=r"All advantages are 0: .* all rewards are equal \(their mean is 0\)",
        ends=r"No reward for 4 rollout steps in a row",
        exit_code=3,
        keeps=4,
    ),
    Scenario(
        title="a column that does not reach the reward",
        cause="reward_bug",
        event="stop",
        settings={"model.rewards": [reward("NeedsColumn")]},
        says=r"KeyError: 'difficulty'",
        ends=r"Stopped because of a bug in reward 'needs_column'",
        exit_code=1,
        keeps=0,
        shows_traceback=True,
    ),
    Scenario(
        title="null gold answers",
        cause="row_refused",
        settings={
            "data": {
                "class_path": "PromptData",
                "init_args": {"train": "rows.jsonl", "prompts_per_step": 4},
            },
            "model.rewards": [{"class_path": "MathReward"}],
        },
        says=r"error: 8 of 16 rows have no gold answer in 'answer': rows\.jsonl, row 2",
        exit_code=2,
        keeps=None,
        prepare=write_null_answers,
    ),
    Scenario(
        title="all completions truncated",
        cause="truncated",
        event="warning",
        settings={"model.sampling": {"max_tokens": 2}},
        says=r"100% of the completions were cut off at the token limit",
    ),
    Scenario(
        title="rewards that cancel out",
        cause="cancelling_rewards",
        event="warning",
        settings={"model.rewards": [reward("ShareOfDigits"), reward("Opposite", name="opposite")]},
        says=r"differ inside groups: they cancel out in the weighted sum",
        ends=r"No reward for 4 rollout steps in a row",
        exit_code=3,
        keeps=4,
    ),
    Scenario(
        title="a reward that never returns",
        cause="stalled",
        event="stop",
        settings={
            "model.rewards": [reward("Deadlock")],
            "trainer.callbacks": [*BASE["trainer"]["callbacks"], watchdog(action="stop")],
        },
        says=r"No progress for .* in stage reward of rollout step 3.* It looks like a deadlock",
        ends=r"Stopped after (\d+) rollout steps\. No progress",
        exit_code=8,
        keeps=3,
    ),
    Scenario(
        title="an oversized first step",
        cause="slow_stage",
        event="warning",
        settings={
            "model.rewards": [reward("Slow")],
            "trainer.callbacks": [*BASE["trainer"]["callbacks"], watchdog()],
            "trainer.max_steps": 1,
        },
        says=r"of rollout step 0 is slow but advances, .* of 32 completions",
        keeps=1,
    ),
    Scenario(
        title="the time is up",
        cause="time_is_up",
        event="stop",
        settings=LONG | {"trainer.max_time": "00:00:00:12", "model.sampling.max_tokens": 24},
        says=r"Ended after (\d+) rollout steps: trainer.max_time is reached",
        exit_code=7,
        keeps=SOME,
    ),
    Scenario(
        title="a NaN gradient at step 15",
        cause="not_finite_gradient",
        settings=callback("NaNGradients", first=15, last=15) | {"trainer.max_steps": 24},
        says=r"the gradient of optimizer step 16 is not finite .* so the step is skipped",
        keeps=25,
    ),
    Scenario(
        title="NaN gradients from step 3 on",
        cause="not_finite_gradient",
        event="rollback",
        settings=callback("NaNGradients", last=10_000),
        says=r"the gradient of optimizer step 4 is not finite .*: 1 in a row, of at most 5",
        ends=r"Rolled back to step_000003.ckpt, 1 of at most 2 times",
        exit_code=6,
        keeps=18,
    ),
    Scenario(
        title="a NaN weight",
        cause="not_finite_weights",
        event="rollback",
        settings=callback("NaNWeights"),
        says=r"rollout step 3: Weights of the policy are NaN .* Rolled back to step_000002.ckpt",
    ),
    Scenario(
        title="out of memory in the update",
        cause="out_of_memory",
        event="crash",
        settings=callback("LittleMemory") | {"data.init_args.prompts_per_step": 64},
        environment={"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory is given back
        says=r"out of memory in the stage micro_batch.*max_tokens_per_micro_batch",
        exit_code=1,
        keeps=3,
    ),
    Scenario(
        title="the disk is full while saving",
        cause="disk_full",
        settings=LONG | {"trainer.callbacks": [EVERY_STEP]},
        command=SMALL_DISK,
        says=r"needs .* and its disk has .* left, so writing it will probably fail",
        ends=r"error: the disk is full",
        exit_code=1,
        keeps=SOME,
    ),
    Scenario(
        title="the newest checkpoint is damaged",
        cause="checkpoint_damaged",
        then=flip_a_byte,
        says=r"is damaged",
    ),
    Scenario(
        title="SIGTERM",
        cause="signal",
        event="stop",
        settings=LONG,
        drive=send(signal.SIGTERM),
        says=r"SIGTERM: ending with a checkpoint",
        ends=r"Ended by SIGTERM after (\d+) rollout steps",
        exit_code=143,
        keeps=SOME,
    ),
    Scenario(
        title="Ctrl-C",
        cause="signal",
        event="stop",
        settings=LONG,
        drive=send(signal.SIGINT),
        says=r"SIGINT: ending with a checkpoint",
        ends=r"Ended by SIGINT after (\d+) rollout steps",
        exit_code=130,
        keeps=SOME,
    ),
    Scenario(
        title="SIGKILL, then --ckpt_path auto",
        cause="signal",
        settings={"trainer.max_steps": 60},
        drive=send(signal.SIGKILL),
        then=lambda run: None,
        says=r"resuming from .*\.ckpt at rollout step",
        keeps=60,
    ),
    Scenario(
        title="wandb's service is killed",
        cause="wandb_failed",
        event="warning",
        settings=with_wandb("SIGKILL"),
        says=r"wandb failed in",
    ),
    Scenario(
        title="wandb's service hangs",
        cause="wandb_failed",
        settings=with_wandb("SIGSTOP"),
        says=r"wandb failed in .* no answer within",
    ),
)
