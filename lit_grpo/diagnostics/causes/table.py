"""The causes of trouble that a run knows, by their names.

Messages of a run, its events, `HealthMonitor` and ``docs/troubleshooting.md`` take their words from
this table.
"""

from __future__ import annotations

from lit_grpo.diagnostics.causes.ends import ENDS
from lit_grpo.diagnostics.causes.machine import MACHINE
from lit_grpo.diagnostics.causes.policy import POLICY
from lit_grpo.diagnostics.causes.rewards import REWARDS
from lit_grpo.diagnostics.causes.rollouts import ROLLOUTS
from lit_grpo.stopping import ExitCode, is_of_signal

CAUSES = {cause.name: cause for cause in (*REWARDS, *ROLLOUTS, *POLICY, *MACHINE, *ENDS)}
"""Name -> cause."""

_OF_EXIT_CODE: dict[int, str] = {
    ExitCode.CRASHED: "crashed",
    ExitCode.WRONG_INPUT: "wrong_input",
    ExitCode.NO_REWARD: "no_reward",
    ExitCode.SCORES_ABSENT: "score_outage",
    ExitCode.ENGINE_FAILED: "engine_outage",
    ExitCode.DIVERGED: "not_finite_weights",
    ExitCode.TIME_IS_UP: "time_is_up",
    ExitCode.STALLED: "stalled",
    ExitCode.RANK_LOST: "rank_lost",
}
"""The commonest cause of an exit code."""


def cause_of_exit(exit_code: int) -> str:
    """Return the name of the cause of an end of which nothing but the exit code is known.

    One of a user's own, such as ``exit_code_20``, is not in the table.
    """
    if is_of_signal(exit_code):
        return "signal"
    return _OF_EXIT_CODE.get(exit_code, f"exit_code_{exit_code}")
