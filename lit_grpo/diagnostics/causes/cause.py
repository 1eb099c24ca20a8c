"""A kind of trouble: what it means, what to do, who acts, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_grpo.stopping import ExitCode

Action = Literal["ignore", "warn", "alert", "skip", "roll_back", "stop"]
"""``alert`` is a warning that `Alerts` sends; ``skip`` warns and skips the update."""

MONITOR = "`HealthMonitor`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One kind of trouble."""

    name: str
    title: str
    meaning: str
    """How it shows, and why it matters; Markdown."""
    advice: tuple[str, ...]
    """What to do, the likeliest remedy first; sentences in Markdown, without links."""
    more: tuple[str, ...] = ()
    """Further remedies, for the documentation only."""
    noticed_by: str
    patience: int = 1
    """Rollout steps in a row before somebody acts."""
    action: Action = "warn"
    alert_after: int | None = None
    """Rollout steps in a row after which a warning becomes an alert."""
    then: str = ""
    """What follows, where a single word does not say it."""
    exit_code: ExitCode | None = None
    """Exit code of a run that it ends."""
    is_trouble: bool = False
    """Whether a checkpoint of such a step is not a healthy one."""

    @property
    def remedies(self) -> tuple[str, ...]:
        """The advice as sentences of a message, without marks of Markdown."""
        return tuple(one.replace("`", "") for one in self.advice)

    @property
    def remedy(self) -> str:
        return " ".join(self.remedies)

    @property
    def actions(self) -> str:
        """What happens, and when, in words."""
        action = self.action.replace("_", " ")
        stages = [f"{action} after {self.patience}" if self.patience > 1 else action]
        if self.alert_after is not None:
            stages.append(f"alert after {self.alert_after}")
        if self.then:
            stages = [*stages, self.then] if len(stages) > 1 or self.patience > 1 else [self.then]
        return ", ".join(stages)
