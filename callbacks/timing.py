"""Log where the time and memory of a rollout step go, as metrics and as a log line per stage."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics.step_log import StepLog, step_number
from lit_grpo.diagnostics.waits import describe_wait
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.runs.files.events import record_event
from lit_grpo.types import RolloutBatch, Stage
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

STAGE_METRICS = {
    "generation": "timing/generation_duration_s",
    "reward": "timing/reward_exposed_duration_s",
    "logprob": "timing/logprob_duration_s",
    "update": "timing/update_duration_s",
    "weight_sync": "timing/weight_sync_duration_s",
}

GIB = 2**30
REPEAT_EVERY = 50
WATCHED_STEPS = 5
MIN_WAITING_STEPS = 3
"""So many of the watched steps must wait: the start of a worker or a client takes long once."""


@checks_keywords
@checks_types
class TimingLog(Callback):
    """Log ``timing/…`` and ``perf/…`` with the step's other metrics.

    ``perf/memory_allocated_gb`` and ``perf/memory_reserved_gb`` are the step's peaks on the GPU, in
    units of 2^30 bytes. Without a GPU the first is the resident memory of the process and the
    second is left out. If three of five steps in a row spend most of their time waiting for
    rewards, a warning says what to change, the first time and at every 50th such step.

    Args:
        stages: Also log a line when a stage ends, during the step: step, stage, seconds, memory and
            details of the stage.
    """

    def __init__(self, stages: bool = False) -> None:
        self.stages = stages
        self._step_start = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._has_waited: deque[bool] = deque(maxlen=WATCHED_STEPS)
        self._num_waiting_steps = 0
        self._step_log = StepLog()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A stage that this step skips takes 0 seconds.
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._step_start = time.perf_counter()

    def on_stage_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self._seconds[stage.name] = self._seconds.get(stage.name, 0.0) + stage.seconds
        if self.stages and trainer.is_global_zero:
            log.info("%s", _stage_line(step_number(trainer), stage, memory_gb(pl_module.device)))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step_seconds = time.perf_counter() - self._step_start
        metrics = {"timing/step_duration_s": step_seconds} | _peak_memory(pl_module.device)
        if isinstance(outputs, Mapping) and "rollouts" in outputs:
            rollouts = outputs["rollouts"]
            metrics |= self._stage_metrics(step_seconds)
            metrics |= _rollout_metrics(trainer, rollouts, step_seconds)
            if trainer.is_global_zero:
                exposed = metrics.get("timing/reward_exposed_duration_s", 0.0)
                describe = partial(_slowest_reward, getattr(pl_module, "rewards", None), rollouts)
                wait = describe_wait(outputs["metrics"], exposed, step_seconds, describe)
                self._warn_of_wait(trainer, wait)
            if self.stages and trainer.is_global_zero:
                step = step_number(trainer)
                memory = memory_gb(pl_module.device)
                log.info("%s", _step_line(step, step_seconds, memory, outputs))
        self._step_log.log(pl_module, metrics)

    def _warn_of_wait(self, trainer: L.Trainer, reason: str | None) -> None:
        self._has_waited.append(reason is not None)
        if reason is None or sum(self._has_waited) < MIN_WAITING_STEPS:
            return
        if self._num_waiting_steps % REPEAT_EVERY == 0:
            log.warning("step %d: %s", step_number(trainer), reason)
            record_event(trainer, "warning", reason, "slow_stage")
        self._num_waiting_steps += 1

    def _stage_metrics(self, step_seconds: float) -> dict[str, float]:
        metrics = {
            metric: self._seconds[stage]
            for stage, metric in STAGE_METRICS.items()
            if stage in self._seconds
        }
        exposed = metrics.get("timing/reward_exposed_duration_s", 0.0)
        return metrics | {"timing/gpu_phase_duration_s": step_seconds - exposed}


def _rollout_metrics(
    trainer: L.Trainer, rollouts: RolloutBatch, step_seconds: float
) -> dict[str, float]:
    """Return total reward seconds and the token rate, over all ranks."""
    tokens = sum(len(completion.token_ids) for completion in rollouts.completions)
    reward_seconds = sum(
        score.seconds
        for group in rollouts.groups
        for scores in group.scores.values()
        for score in scores
    )
    sums = torch.tensor([tokens, reward_seconds], device=trainer.strategy.root_device)
    tokens, reward_seconds = trainer.strategy.reduce(sums, reduce_op="sum").tolist()
    return {
        "timing/reward_total_duration_s": reward_seconds,
        "perf/tokens_per_second": tokens / step_seconds,
    }


def _slowest_reward(suite: RewardSuite | None, rollouts: RolloutBatch) -> str:
    """Return which reward of a step takes longest, and how to shorten it."""
    rewards = suite.rewards if suite else ()
    seconds = {reward: _seconds_to_wait_for(reward, rollouts) for reward in rewards}
    if not seconds:
        return ""
    slowest = max(seconds, key=lambda reward: seconds[reward])
    if not slowest.is_async:
        how = "runs in one thread. Make it async, or run it in several processes with ProcessReward"
    elif num_workers := getattr(slowest, "num_workers", None):
        how = f"has {num_workers} worker processes. Raise its num_workers if there are CPU cores"
    else:
        how = "is async. Shorten its calls, or let more of them run at a time"
    return f"Reward {slowest.name!r} takes longest and {how}."


def _seconds_to_wait_for(reward: Reward, rollouts: RolloutBatch) -> float:
    """Return how long a step has to wait for a reward; calls of an async one overlap.

    The scores of a grouped reward share the seconds of their call.
    """
    groups = [[one.seconds for one in group.scores[reward.name]] for group in rollouts.groups]
    if not reward.is_async:
        return sum(map(sum, groups))
    return max(map(sum if reward.is_grouped else max, groups), default=0.0)


def memory_gb(device: torch.device) -> float:
    """Return the memory in use: allocated on the GPU, or resident memory without one."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB
    return float(psutil.Process().memory_info().rss) / GIB


def _peak_memory(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"perf/memory_allocated_gb": memory_gb(device)}
    return {
        "perf/memory_allocated_gb": torch.cuda.max_memory_allocated(device) / GIB,
        "perf/memory_reserved_gb": torch.cuda.max_memory_reserved(device) / GIB,
    }


def _stage_line(step: int, stage: Stage, memory: float) -> str:
    name = stage.name if stage.micro_batch is None else f"{stage.name} {stage.micro_batch}"
    details = "".join(f"  {key} {float(value):.4g}" for key, value in stage.details.items())
    return f"{_line(step, name, stage.seconds, memory)}{details}"


def _step_line(step: int, seconds: float, memory: float, outputs: Mapping[str, Any]) -> str:
    valid, metrics = outputs["rollouts"].valid, outputs["metrics"]
    mean, deviation = (metrics.get(f"reward/{name}", float("nan")) for name in ("mean", "std"))
    return (
        f"{_line(step, 'total', seconds, memory)}  rewards {mean:.3f}±{deviation:.3f} "
        f"({int(valid.sum())} of {valid.numel()} valid)"
    )


def _line(step: int, name: str, seconds: float, memory: float) -> str:
    return f"step {step}  {name:<14} {seconds:8.2f} s  {memory:7.2f} GiB"
