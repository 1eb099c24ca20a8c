"""What a test may make go wrong in the server while it runs, and what the server saw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Faults:
    """What goes wrong from now on: the JSON object of ``POST /test/faults`` replaces all of it.

    ``{}`` makes the server sound again. Counts go down as they are used.
    """

    generate_statuses: list[int] = field(default_factory=list)
    """The next /generate calls are answered with these statuses, one each."""
    hang_generate: int = 0
    """The next N /generate calls are never answered."""
    cut_generate: int = 0
    """The next N /generate calls lose their connection after two tokens, streamed or not."""
    token_delay_seconds: float = 0.0
    """Before every token of every request."""
    stale_updates: int = 0
    """The next N updates (weights or adapter) answer success and move the label, nothing else."""
    refuse_updates: int = 0
    """The next N updates (weights or adapter) answer 400 and change nothing."""
    hang_updates: int = 0
    """The next N updates (weights or adapter) are never answered and change nothing."""
    weight_version: str | None = None
    """Reported everywhere in place of the true label."""
    unhealthy_checks: int = 0
    """The next N health checks answer 503."""

    def strikes(self, name: str) -> bool:
        """Whether this counted fault hits the present call, which it then uses up."""
        count = getattr(self, name)
        setattr(self, name, max(count - 1, 0))
        return count > 0


@dataclass(kw_only=True)
class Log:
    """What the server saw, without the calls to /test; ``GET /test/log`` answers with it."""

    requests: Counter[str] = field(default_factory=Counter)
    """Calls by path."""
    connections: int = 0
    """Opened by clients that sent something."""
    generating: int = 0
    """/generate calls that are inside now."""
    most_unfinished: int = 0
    """Most sequences that were under way at once, since the last ``POST /test/count_anew``."""
    dropped: int = 0
    """Sequences aborted because the connection of their call was lost."""
