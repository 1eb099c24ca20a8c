"""The rules of `HealthMonitor`: how long a cause of trouble is tolerated, and what is done then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lit_grpo.diagnostics.causes.cause import Action, Cause
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.step_checks import BEFORE_UPDATE, CHECKS
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.spelling import did_you_mean

KEY = "HealthMonitor.init_args.rules"


@checks_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When to act on a cause of trouble, and how; null is the default of the cause."""

    patience: int | None = None
    """Rollout steps in a row."""
    action: Action | None = None
    alert_after: int | None = None
    """Rollout steps in a row after which a warning becomes an alert."""

    def __post_init__(self) -> None:
        check_fields(f"{KEY}.CAUSE", self)


@dataclass(slots=True)
class WatchedCause:
    """A cause with its rule, and how often it was found."""

    cause: Cause
    patience: int
    action: Action
    alert_after: int | None
    streak: int = 0
    num_due: int = 0
    """Steps of the run at which the patience was over."""

    num_steps: int = 0
    """Steps until now with the trouble, noticed or not."""

    @property
    def is_due(self) -> bool:
        return self.streak >= self.patience

    @property
    def has_lasted(self) -> bool:
        """Whether it has lasted long enough for its warning to be an alert."""
        return self.alert_after is not None and self.streak >= self.alert_after

    def should_report(self, repeat_every: int) -> bool:
        """Return whether this is one of the steps with a message."""
        is_turn = self.num_due == 1 or self.num_due % repeat_every == 0
        return is_turn or self.streak == self.alert_after


def watch_causes(rules: Mapping[str, Rule]) -> dict[str, WatchedCause]:
    """Return every cause that a check looks for, by name, with its rule.

    Raises:
        UserError: a cause is not known, or a rule makes no sense.
    """
    if unknown := sorted({*rules} - {*CHECKS}):
        error = setting_error(KEY, f"causes among {', '.join(CHECKS)}", unknown[0])
        raise UserError(f"{error}{did_you_mean(unknown[0], CHECKS)}")
    return {name: _watch(CAUSES[name], rules.get(name, Rule())) for name in CHECKS}


def _watch(cause: Cause, rule: Rule) -> WatchedCause:
    patience = cause.patience if rule.patience is None else rule.patience
    check_range(f"{KEY}.{cause.name}.patience", patience, at_least=1)
    action = rule.action or cause.action
    if action == "skip" and cause.name not in BEFORE_UPDATE:
        raise UserError(
            f"HealthMonitor cannot skip an update because of {cause.name}, which shows only after "
            f"it. Causes that show before are {', '.join(BEFORE_UPDATE)}. Set another action of "
            f"{KEY}.{cause.name}."
        )
    return WatchedCause(cause, patience, action, _alert_after(cause, rule, patience, action))


def _alert_after(cause: Cause, rule: Rule, patience: int, action: Action) -> int | None:
    """Return after how many steps in a row a warning becomes an alert; None for never."""
    key = f"{KEY}.{cause.name}.alert_after"
    if action != "warn":
        if rule.alert_after is not None:
            raise setting_error(key, f"null with action {action}", rule.alert_after)
        return None
    if rule.alert_after is None:
        return None if cause.alert_after is None else max(cause.alert_after, patience)
    check_range(key, rule.alert_after, at_least=patience, why="the warning must come before")
    return rule.alert_after
