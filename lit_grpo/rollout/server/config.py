"""The settings of the watch over inference servers. Watches nothing."""

from __future__ import annotations

from dataclasses import dataclass

from lit_grpo.types import UserError


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """How servers are watched, and what is done about one that is not well.

    Args:
        startup_timeout: Seconds that a server has until it answers, at first and when restarted.
        health_interval: Seconds between two looks at a server.
        health_timeout: Seconds that it has to answer.
        unhealthy_after: Looks in a row that fail before it is taken out.
        silence_timeout: Seconds in which a server with work says nothing before it is asked to
            sample one token, within ``health_timeout``: one that hangs may still say that it is
            well.
        weight_sync_timeout: Seconds that one request of a weight update may take, and its proof.
        max_restarts: Restarts in a row after which a server is given up, and the run with the
            last one; an hour of good service forgets them.
        first_backoff: Seconds before the first restart; each further one waits twice as long.
        max_backoff: Longest wait, in seconds, give or take half of it.

    Raises:
        ValueError: a number that is not positive.
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
        for name, value in vars(self).items():
            rule = ">= 0" if name == "max_restarts" else "positive"
            if not (value > 0 or (value == 0 and rule == ">= 0")):
                raise UserError(
                    f"supervision.{name} must be {rule}, got {value}. "
                    f"Set model.engine.init_args.supervision.{name}."
                )
