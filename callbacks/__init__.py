"""Callbacks for ``trainer.callbacks``: they observe a run and may stop it, but change no result."""

from lit_grpo.callbacks.push_to_hub import PushToHub
from lit_grpo.callbacks.signal_warnings import SignalWarnings
from lit_grpo.callbacks.timing import TimingLog
from lit_grpo.callbacks.wandb_teardown import WandbTeardown
from lit_grpo.callbacks.zero_reward import ZeroRewardBreaker
from lit_grpo.runs.checkpoints import Checkpoints
from lit_grpo.runs.progress import RolloutProgressBar

__all__ = [
    "Checkpoints",
    "PushToHub",
    "RolloutProgressBar",
    "SignalWarnings",
    "TimingLog",
    "WandbTeardown",
    "ZeroRewardBreaker",
]
