"""Settings for the supervision of inference servers."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.types import check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How servers are watched, and when an unhealthy one is restarted.

    Args:
        startup_timeout: Seconds a server may take to answer after it is started or restarted.
        health_interval: Seconds between two health checks.
        health_timeout: Seconds a server may take to answer a health check.
        unhealthy_after: Consecutive failed health checks before a server is restarted.
        silence_timeout: Seconds without a new token from a server that has requests, before it is
            asked for a single token. If that does not come within ``health_timeout``, the server is
            restarted: a server that hangs may still answer health checks.
        weight_sync_timeout: Seconds that each request of a weight update may take; also the limit
            for the check of the new weights.
        max_restarts: Consecutive restarts before a server is abandoned; when the last server is
            abandoned, the run ends. An hour without a restart resets the count.
        first_backoff: Seconds before the first restart; the wait doubles with each further
            restart.
        max_backoff: Longest wait before a restart in seconds; up to half of it is added or
            subtracted at random.

    Raises:
        UserError: a value is out of range.
    """

    startup_timeout: float = 600.0
    health_interval: float = 5.0
    health_timeout: float = 30.0
    unhealthy_after: int = 3
    silence_timeout: float = 120.0
    weight_sync_timeout: float = 300.0
    max_restarts: int = 3
    first_backoff: float = 1.0
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        key = "model.engine.init_args.supervision"
        check_fields(key, self)
        for name, value in vars(self).items():
            if name == "max_restarts":
                check_range(f"{key}.{name}", value, at_least=0)
            else:
                check_range(f"{key}.{name}", value, above=0)
