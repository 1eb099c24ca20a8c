"""The faults that a test can set while the server runs, and the server's log of requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Faults:
    """The current faults, replaced as a whole by the JSON object of ``POST /test/faults``.

    ``{}`` removes all faults. Counts are decremented as they are used.
    """

    generate_statuses: list[int] = field(default_factory=list)
    """Statuses of the next /generate calls, one each."""
    hang_generate: int = 0
    """The next N /generate calls are never answered."""
    cut_generate: int = 0
    """The connections of the next N /generate calls are dropped after two tokens."""
    token_delay_seconds: float = 0.0
    """Delay before every token of every request."""
    hold_after_tokens: int | None = None
    """Requests with so many tokens wait until the fault is removed or they are aborted."""
    stale_updates: int = 0
    """The next N updates (weights or adapter) report success and change the label only."""
    refuse_updates: int = 0
    """The next N updates (weights or adapter) answer 400 and change nothing."""
    hang_updates: int = 0
    """The next N updates (weights or adapter) are never answered and change nothing."""
    weight_version: str | None = None
    """Reported in place of the true label."""
    unhealthy_checks: int = 0
    """The next N health checks answer 503."""

    def strikes(self, name: str) -> bool:
        """Return whether a counted fault applies to this call, and decrement its count."""
        count = getattr(self, name)
        setattr(self, name, max(count - 1, 0))
        return count > 0


@dataclass(kw_only=True)
class Log:
    """What the server counted, without the calls to /test; the reply to ``GET /test/log``."""

    requests: Counter[str] = field(default_factory=Counter)
    """Calls by path."""
    connections: int = 0
    """Connections on which something was sent."""
    generating: int = 0
    """/generate calls being handled now."""
    held: int = 0
    """Requests that wait because of ``hold_after_tokens``."""
    most_unfinished: int = 0
    """Largest number of unfinished sequences since the last ``POST /test/reset_count``."""
    dropped: int = 0
    """Sequences aborted because their client disconnected."""
