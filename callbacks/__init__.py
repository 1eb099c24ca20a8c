"""Callbacks for ``trainer.callbacks``: they observe a run and may stop it, but change no result."""

from lit_grpo.callbacks.exit_checkpoint import ExitCheckpoint
from lit_grpo.callbacks.progress import RolloutProgressBar
from lit_grpo.callbacks.signal_warnings import SignalWarnings
from lit_grpo.callbacks.timing import TimingLog
from lit_grpo.callbacks.wandb_teardown import WandbTeardown
from lit_grpo.callbacks.zero_reward import ZeroRewardBreaker

__all__ = [
    "ExitCheckpoint",
    "RolloutProgressBar",
    "SignalWarnings",
    "TimingLog",
    "WandbTeardown",
    "ZeroRewardBreaker",
]
