"""Notice what goes wrong in a run, and act: warn, alert, skip an update, roll back or stop."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics import CAUSES, Action, Cause
from lit_grpo.diagnostics.checks import BEFORE_UPDATE, CHECKS, ObservedStep
from lit_grpo.distributed.checkpoints import local_part
from lit_grpo.runs.events import num_finished_steps, record_event
from lit_grpo.runs.rollback import roll_back
from lit_grpo.stopping import ExitCode, stop_run
from lit_grpo.types import RolloutBatch, Stage, StopReason, UserError, check_range, setting_error

log = logging.getLogger(__name__)

NUM_REMEMBERED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When to act on a cause of trouble, and how; null is the default of the cause."""

    patience: int | None = None
    """Rollout steps in a row."""
    action: Action | None = None


@dataclass(slots=True)
class _Watched:
    """A cause with its rule, and how often it was found."""

    cause: Cause
    patience: int
    action: Action
    streak: int = 0
    num_due: int = 0
    """Steps of the run at which the patience was over."""

    @property
    def is_due(self) -> bool:
        return self.streak >= self.patience


class HealthMonitor(Callback):
    """Look for causes of trouble after every rollout step, and act on those that last.

    What it knows is the table of ``docs/troubleshooting.md``; each cause has its own patience and
    action. Values are compared with those of the last 50 steps. All ranks act together, on what
    rank 0 has seen.

    Args:
        rules: By cause, what differs from its defaults, for example
            ``{kl_explosion: {patience: 2, action: roll_back}}``.
        max_rollbacks: Number of times that the run may be rolled back, in all. The next time it
            stops, with exit code 6. It also stops if there is no healthy checkpoint.
        repeat_every: A warning is logged when the patience is over, and then once in this many
            such steps.

    Raises:
        UserError: a cause is not known, or a number is out of range.
    """

    def __init__(
        self,
        rules: dict[str, Rule] | None = None,
        max_rollbacks: int = 2,
        repeat_every: int = 50,
    ) -> None:
        key = "HealthMonitor.init_args."
        check_range(f"{key}max_rollbacks", max_rollbacks, at_least=0)
        check_range(f"{key}repeat_every", repeat_every, at_least=1)
        self.max_rollbacks = max_rollbacks
        self.repeat_every = repeat_every
        self.num_rollbacks = 0
        self._watched = {name: _watch(name, (rules or {}).get(name, Rule())) for name in CHECKS}
        if unknown := sorted({*(rules or {})} - {*CHECKS}):
            raise setting_error(f"{key}rules", f"causes among {', '.join(CHECKS)}", unknown[0])
        self._past: deque[dict[str, float]] = deque(maxlen=NUM_REMEMBERED)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._is_left_out = False

    @property
    def trouble(self) -> str:
        """What has gone wrong lately, which `Checkpoints` asks for; empty if nothing has."""
        return ", ".join(
            f"{one.cause.title[0].lower()}{one.cause.title[1:]}"
            for one in self._watched.values()
            if one.streak and one.cause.is_trouble and one.action != "ignore"
        )

    def on_train_batch_start(self, *args: Any) -> None:
        self._seconds.clear()
        self._is_left_out = False

    def on_stage_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        if stage.micro_batch is None:  # micro-batches are part of the update
            self._seconds[f"seconds/{stage.name}"] += stage.seconds

    def on_rollouts(
        self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: RolloutBatch
    ) -> bool:
        """Return whether to leave out the update on these rollouts, the same on all ranks."""
        due = [
            CHECKS[name]
            for name, one in self._watched.items()
            if one.action == "skip" and one.streak + 1 >= one.patience
        ]
        if not due:  # the streaks are the same on all ranks
            return False
        step = ObservedStep(rollouts=rollouts, metrics={})
        is_found = trainer.is_global_zero and any(check(step) for check in due)
        self._is_left_out = bool(trainer.strategy.broadcast(is_found))
        return self._is_left_out

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
        found = self._find(pl_module, outputs, is_finite) if trainer.is_global_zero else {}
        found = trainer.strategy.broadcast(found)
        for name, one in self._watched.items():
            one.streak = one.streak + 1 if name in found else 0
        for name, message in found.items():
            if self._watched[name].is_due:
                self._act(trainer, pl_module, self._watched[name], message)

    def _find(
        self, pl_module: L.LightningModule, outputs: Mapping[str, Any], are_weights_finite: bool
    ) -> dict[str, str]:
        """Return what is wrong with the step, by cause, and remember its metrics."""
        step = ObservedStep(
            rollouts=outputs["rollouts"],
            batch=outputs.get("batch"),
            metrics=outputs.get("metrics", {}) | self._seconds | _memory(),
            past=tuple(self._past),
            num_skipped=getattr(pl_module, "num_skipped_at_limit", 0),
            weights_are_finite=are_weights_finite,
        )
        self._past.append(dict(step.metrics))
        found = {}
        for name, one in self._watched.items():
            if one.action == "ignore" or (name == "nothing_trained" and self._is_left_out):
                continue
            if message := CHECKS[name](step):
                found[name] = message
        return found

    def _act(
        self, trainer: L.Trainer, pl_module: L.LightningModule, one: _Watched, message: str
    ) -> None:
        one.num_due += 1
        if one.action == "stop":
            self._stop(trainer, one, message)
        elif one.action == "roll_back":
            self._roll_back(trainer, pl_module, one, message)
        elif one.num_due == 1 or one.num_due % self.repeat_every == 0:
            left_out = " The update was left out." if self._is_left_out else ""
            self._warn(trainer, one, f"{message}{left_out}")
            if one.action == "alert":
                record_event(trainer, "alert", message, one.cause.name)

    def _warn(self, trainer: L.Trainer, one: _Watched, message: str) -> None:
        often = "" if one.num_due == 1 else f" ({one.num_due} steps so far)"
        if trainer.is_global_zero:
            step = trainer.fit_loop.total_batch_idx
            log.warning("rollout step %d%s: %s", step, often, message)

    def _roll_back(
        self, trainer: L.Trainer, pl_module: L.LightningModule, one: _Watched, message: str
    ) -> None:
        path, why = None, "there is no healthy checkpoint"
        if self.num_rollbacks >= self.max_rollbacks:
            why = f"it was rolled back {self.num_rollbacks} times already (max_rollbacks)"
        else:
            path = roll_back(trainer, pl_module, num_finished_steps(trainer) - one.streak)
        if path is None:
            self._stop(trainer, one, f"{message} The run is not rolled back: {why}.")
            return
        self.num_rollbacks += 1
        self._past.clear()
        for other in self._watched.values():
            other.streak = 0
        number = f"{self.num_rollbacks} of at most {self.max_rollbacks} times"
        what = f"{message} Rolled back to {path.name}, {number}; the data goes on."
        self._warn(trainer, one, what)
        record_event(trainer, "rollback", what, one.cause.name)

    def _stop(self, trainer: L.Trainer, one: _Watched, message: str) -> None:
        code = one.cause.exit_code or (
            ExitCode.DIVERGED if one.cause.is_trouble else ExitCode.NO_REWARD
        )
        for_steps = "" if one.streak == 1 else f" ({one.streak} rollout steps in a row)"
        text = f"Stopped by HealthMonitor, {one.cause.name}{for_steps}: {message}"
        stop_run(trainer, StopReason(exit_code=code, message=text))

    def state_dict(self) -> dict[str, Any]:
        watched = self._watched.items()
        return {
            "num_rollbacks": self.num_rollbacks,
            "past": list(self._past),
            "streaks": {name: one.streak for name, one in watched if one.streak},
            "num_due": {name: one.num_due for name, one in watched if one.num_due},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_rollbacks = state_dict["num_rollbacks"]
        self._past.extend(state_dict["past"])
        for name, one in self._watched.items():
            one.streak = state_dict["streaks"].get(name, 0)
            one.num_due = state_dict["num_due"].get(name, 0)


def _watch(name: str, rule: Rule) -> _Watched:
    cause = CAUSES[name]
    patience = cause.patience if rule.patience is None else rule.patience
    check_range(f"HealthMonitor.init_args.rules.{name}.patience", patience, at_least=1)
    action = rule.action or cause.action
    if action == "skip" and name not in BEFORE_UPDATE:
        raise UserError(
            f"HealthMonitor cannot skip an update because of {name}, which shows only after it. "
            f"Causes that show before are {', '.join(BEFORE_UPDATE)}. Set another action of "
            f"HealthMonitor.init_args.rules.{name}."
        )
    return _Watched(cause, patience, action)


def _memory() -> dict[str, float]:
    """Return signs of a lack of memory, of the host and of the GPU."""
    host = psutil.virtual_memory()
    values = {"memory/available_fraction": host.available / host.total}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        values["memory/num_alloc_retries"] = float(retries)
    return values


@torch.no_grad()
def _are_finite(module: L.LightningModule) -> bool:
    """Return whether all trained weights, or this rank's parts, are finite, by their norms."""
    weights = [local_part(one) for one in module.parameters() if one.requires_grad]
    norms = torch._foreach_norm(weights) if weights else []
    return not norms or bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
