"""Notice what goes wrong in a run, and act: warn, alert, skip an update, roll back or stop."""

from __future__ import annotations

import logging
import math
import operator
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics.observed_step import ObservedStep
from lit_grpo.diagnostics.step_checks import CHECKS, COMPARED, NOT_FINITE, has_fallen
from lit_grpo.diagnostics.step_counts import StepCounts, count_step
from lit_grpo.diagnostics.step_log import step_number
from lit_grpo.distributed.checkpoints import local_part
from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.runs.checkpoints.rollback import RollbackHistory, roll_back, step_of
from lit_grpo.runs.files.events import EventKind, num_finished_steps, record_event
from lit_grpo.runs.health.rules import Rule, WatchedCause, watch_causes
from lit_grpo.stopping import ExitCode, for_this_run, get_stop_reason, stop_run
from lit_grpo.types import RolloutBatch, Stage, StopReason, check_range
from lit_grpo.types.errors import Diverged
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

NUM_REMEMBERED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """Something that is wrong with a step."""

    message: str
    num_steps: int
    """Steps until this one in which the metric was as bad; 1 if nothing is compared."""


@checks_keywords
@checks_types
class HealthMonitor(Callback):
    """Look for causes of trouble after every rollout step, and act on those that last.

    It knows the causes in ``docs/troubleshooting.md``, each with a patience and an action of its
    own. Values are compared with the last 50 steps, from the 11th step on. All ranks
    act together, on the rollouts of all, and on the seconds and the memory of rank 0.

    Args:
        rules: By cause, what differs from its defaults, for example
            ``{kl_explosion: {patience: 2, action: roll_back}}``. A warning of a cause with
            ``alert_after`` becomes an alert when it has lasted for so many steps.
        max_rollbacks: Number of times that the run may be rolled back, in all. The next time it
            stops, with exit code 6. It also stops if there is no healthy checkpoint.
        repeat_every: A warning is logged when the patience is over, when it becomes an alert, and
            then once in this many such steps.
        enabled: False leaves it out of the run, which has one otherwise.

    Raises:
        UserError: a cause is not known, or a number is out of range.
    """

    def __init__(
        self,
        rules: dict[str, Rule] | None = None,
        max_rollbacks: int = 2,
        repeat_every: int = 50,
        enabled: bool = True,
    ) -> None:
        key = "HealthMonitor.init_args."
        check_range(f"{key}max_rollbacks", max_rollbacks, at_least=0)
        check_range(f"{key}repeat_every", repeat_every, at_least=1)
        self.max_rollbacks = max_rollbacks
        self.repeat_every = repeat_every
        self.enabled = enabled
        self._watched = watch_causes(rules or {})
        self._past: deque[dict[str, float]] = deque(maxlen=NUM_REMEMBERED)
        self._reward_range: tuple[float, float] | None = None
        """The lowest and the highest reward of the run until now."""
        self._rollback_history = RollbackHistory()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_skipped = False

    @property
    def trouble(self) -> str:
        """Recent trouble, which `Checkpoints` asks for; empty if there is none."""
        return ", ".join(
            f"{one.cause.title[0].lower()}{one.cause.title[1:]}"
            for one in self._watched.values()
            if one.streak and one.cause.is_trouble and one.action != "ignore"
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self._seconds.clear()
        self._is_skipped = False
        self._check_weights(trainer, pl_module)

    def _check_weights(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act on weights that are no longer finite since the last step: sampling would fail.

        Raises:
            Diverged: they are not finite, and the run is to stop.
        """
        one = self._watched["not_finite_weights"]
        if one.action not in ("roll_back", "stop") or not hasattr(pl_module, "on_roll_back"):
            return
        if trainer.strategy.reduce_boolean_decision(_are_finite(pl_module)):
            return
        one.streak = one.num_steps = 1
        remedy = "Something other than an optimizer step, such as a callback, may have changed them"
        message = f"Weights of the policy are NaN or infinite before this step. {remedy}."
        self._act(trainer, pl_module, one, message)
        if (reason := get_stop_reason(trainer)) is not None:
            raise Diverged(reason.message)

    def on_stage_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if stage.micro_batch is None:  # micro-batches are part of the update
            self._seconds[f"seconds/{stage.name}"] += stage.seconds

    def on_rollouts(
        self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: RolloutBatch
    ) -> str:
        """Return why to skip the update on these rollouts, the same on all ranks, or ""."""
        due = [
            name
            for name, one in self._watched.items()
            if one.action == "skip" and one.streak + 1 >= one.patience
        ]
        if not due:  # the streaks are the same on all ranks
            return ""
        counts = of_all_ranks(count_step(rollouts))
        step = ObservedStep(counts=counts, metrics={}, can_end=_can_end(pl_module))
        cause = next((name for name in due if CHECKS[name](step)), "")
        self._is_skipped = bool(cause)
        return cause

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(outputs, Mapping) or "rollouts" not in outputs:
            return
        is_finite = trainer.strategy.reduce_boolean_decision(_are_finite(pl_module))
        # Ranks have the same counts, but each has seconds and memory of its own.
        found = trainer.strategy.broadcast(self._find(pl_module, outputs, is_finite))
        for name, one in self._watched.items():
            one.streak = one.streak + 1 if name in found else 0
            one.num_steps = max(one.streak, found[name].num_steps) if name in found else 0
        for name, finding in found.items():
            if self._watched[name].is_due:
                self._act(trainer, pl_module, self._watched[name], finding.message)

    def _find(
        self, pl_module: L.LightningModule, outputs: Mapping[str, Any], are_weights_finite: bool
    ) -> dict[str, _Finding]:
        """Return what is wrong with the step, by cause, and remember its metrics, on all ranks."""
        skipped = getattr(pl_module, "skipped_steps", None)  # of a GRPOModule
        metrics = outputs.get("metrics", {}) | self._seconds | _memory()
        rollouts, batch = outputs["rollouts"], outputs.get("batch")
        own = count_step(rollouts, batch, with_repetition=has_fallen(self._past, metrics))
        step = ObservedStep(
            counts=of_all_ranks(own),
            metrics=metrics,
            past=tuple(self._past),
            reward_range=self._reward_range,
            num_skipped=skipped.num_at_limit if skipped else 0,
            weights_are_finite=are_weights_finite,
            can_end=_can_end(pl_module),
        )
        self._past.append(dict(step.metrics))
        if step.counts.num_valid:
            low, high = self._reward_range or (math.inf, -math.inf)
            self._reward_range = min(low, step.counts.worst), max(high, step.counts.best)
        is_skipped = bool(metrics.get("policy/skipped_fraction"))  # any callback may do that
        found = {}
        for name, one in self._watched.items():
            if one.action == "ignore" or (name == "nothing_trained" and is_skipped):
                continue
            if message := CHECKS[name](step):
                away = step.num_steps_away(COMPARED[name]) if name in COMPARED else 1
                found[name] = _Finding(message=message, num_steps=away)
        return found

    def _act(
        self, trainer: L.Trainer, pl_module: L.LightningModule, one: WatchedCause, message: str
    ) -> None:
        one.num_due += 1
        if one.action == "stop":
            self._stop(trainer, one, message)
        elif one.action == "roll_back":
            self._roll_back(trainer, pl_module, one, message)
        elif one.should_report(self.repeat_every):
            if self._is_skipped:
                message += " The update was skipped."
            if one.has_lasted:
                message += f" Rollout steps in a row like this one: {one.streak}."
            self._warn(trainer, one, message)
            is_alert = one.has_lasted or one.action == "alert"
            kind: EventKind = "alert" if is_alert else "warning"
            record_event(trainer, kind, message, one.cause.name)

    def _warn(self, trainer: L.Trainer, one: WatchedCause, message: str) -> None:
        is_first = one.num_due == 1 or one.has_lasted
        often = "" if is_first else f" ({one.num_due} steps so far)"
        if trainer.is_global_zero:
            said = for_this_run(trainer, message)
            log.warning("rollout step %d%s: %s", step_number(trainer), often, said)

    def _roll_back(
        self, trainer: L.Trainer, pl_module: L.LightningModule, one: WatchedCause, message: str
    ) -> None:
        begin = num_finished_steps(trainer) - one.num_steps  # the weights were bad after it
        history = self._rollback_history
        has_bad_weights = one.cause.name not in NOT_FINITE  # those of its first step, too
        if last := history.last_without_effect(begin):
            at, to = last
            message = f"The rollback to step_{to:06d}.ckpt has not helped. {message}"
            if has_bad_weights:  # then so are those that the rollback has restored
                history.passed_over.append((to, at))
        path, why = None, "there is no healthy checkpoint"
        if has_bad_weights:
            why += f" from before step {begin}, when it began"
        num_rollbacks = getattr(pl_module, "num_rollbacks", 0)
        if num_rollbacks >= self.max_rollbacks:
            why = f"it was rolled back {num_rollbacks} times already (max_rollbacks)"
        else:
            path = roll_back(
                trainer,
                pl_module,
                begin,
                passed_over=history.passed_over,
                only_before=has_bad_weights,
            )
        if path is None:
            self._stop(trainer, one, f"{message} The run is not rolled back: {why}.")
            return
        history.add(num_finished_steps(trainer), step_of(path))
        for _ in range(min(one.num_steps, len(self._past))):
            self._past.pop()  # metrics of the troubled steps
        for other in self._watched.values():
            other.streak = 0
        number = f"{num_rollbacks + 1} of at most {self.max_rollbacks} times"
        what = f"{message} Rolled back to {path.name}, {number}; the data goes on."
        self._warn(trainer, one, what)
        record_event(trainer, "rollback", what, one.cause.name)

    def _stop(self, trainer: L.Trainer, one: WatchedCause, message: str) -> None:
        code = one.cause.exit_code or (
            ExitCode.DIVERGED if one.cause.name in COMPARED else ExitCode.NO_REWARD
        )
        for_steps = "" if one.streak == 1 else f" ({one.streak} rollout steps in a row)"
        text = f"Stopped by HealthMonitor, {one.cause.name}{for_steps}: {message}"
        stop_run(trainer, StopReason(exit_code=code, message=text, cause=one.cause.name))

    def state_dict(self) -> dict[str, Any]:
        watched = self._watched.items()
        return {
            "past": list(self._past),
            "reward_range": self._reward_range,
            "rollbacks": list(self._rollback_history.rollbacks),
            "passed_over": list(self._rollback_history.passed_over),
            "streaks": {name: one.streak for name, one in watched if one.streak},
            "num_due": {name: one.num_due for name, one in watched if one.num_due},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._past.extend(state_dict["past"])
        # Checkpoints of earlier versions lack some of these.
        self._reward_range = state_dict.get("reward_range")
        self._rollback_history = RollbackHistory(
            [(at, to) for at, to in state_dict.get("rollbacks", [])],
            [(first, last) for first, last in state_dict.get("passed_over", [])],
        )
        for name, one in self._watched.items():
            one.streak = state_dict["streaks"].get(name, 0)
            one.num_due = state_dict["num_due"].get(name, 0)


def of_all_ranks(counts: StepCounts) -> StepCounts:
    """Return the counts of all ranks together; every rank must call this."""
    return reduce(operator.add, gather_objects(counts))


def _can_end(module: L.LightningModule) -> bool:
    """Return whether anything but the token limit ends a completion of a module."""
    return bool(getattr(module, "can_end", True))


def _memory() -> dict[str, float]:
    """Return signs of a lack of memory, of the host and of the GPU."""
    host = psutil.virtual_memory()
    values = {"memory/available_fraction": host.available / host.total}
    if torch.cuda.is_initialized():
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        values["memory/num_alloc_retries"] = float(retries)
    return values


@torch.no_grad()
def _are_finite(module: L.LightningModule) -> bool:
    """Return whether all trained weights, or this rank's parts, are finite, by their norms."""
    weights = [local_part(one) for one in module.parameters() if one.requires_grad]
    norms = torch._foreach_norm(weights) if weights else []
    return not norms or bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
