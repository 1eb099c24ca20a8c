"""Callbacks for ``trainer.callbacks``: they observe a run and may stop it, but change no result.

The exception is `HealthMonitor`, which may leave out an update or roll back the policy. The
callbacks that every run has are defined in `lit_grpo.runs`.
"""

from lit_grpo.callbacks.alerts import Alerts
from lit_grpo.callbacks.push_to_hub import PushToHub
from lit_grpo.callbacks.timing import TimingLog
from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.runs.health.monitor import HealthMonitor
from lit_grpo.runs.health.rules import Rule
from lit_grpo.runs.health.zero_reward import ZeroRewardBreaker
from lit_grpo.runs.progress.progress_bar import RolloutProgressBar
from lit_grpo.runs.shutdown.watchdog import StallWatchdog
from lit_grpo.runs.wandb_teardown import WandbTeardown

__all__ = [
    "Alerts",
    "Checkpoints",
    "HealthMonitor",
    "PushToHub",
    "RolloutProgressBar",
    "Rule",
    "StallWatchdog",
    "TimingLog",
    "WandbTeardown",
    "ZeroRewardBreaker",
]
