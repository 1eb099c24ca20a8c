"""Callbacks that hold a run while a test acts on it, however slow either of them is."""

import time
from pathlib import Path

import lightning as L
from served_engines import launched_servers


class HoldRun(L.Callback):
    """Wait before a rollout step until the file ``go`` is in the working directory."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, *_):
        while pl_module.rollout_step == self.step and not Path("go").exists():
            time.sleep(0.02)


class HoldServer(L.Callback):
    """Hold the completions of the run's server after a rollout step, until it is killed."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._has_held = False

    def on_train_batch_end(self, trainer, pl_module, *_):
        if pl_module.rollout_step == self.step and not self._has_held:
            self._has_held = True  # the next step may be left undone, and have the same number
            (server,) = launched_servers()
            server.faults(hold_after_tokens=2)
