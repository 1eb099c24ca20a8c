"""Callbacks that hold a run while a test acts on it, however slow either of them is."""

import os
import signal
import threading
import time
from pathlib import Path

import lightning as L
from served_engines import launched_servers
from small_runs import ShareOfLowBytes

from lit_grpo.distributed.ranks import get_rank
from lit_grpo.rollout import engine
from lit_grpo.runs.shutdown import watchdog


class HoldRun(L.Callback):
    """Wait before a rollout step until the file ``go`` is in the working directory."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, *_):
        while pl_module.rollout_step == self.step and not Path("go").exists():
            time.sleep(0.02)


class LoseRank(L.Callback):
    """End rank 1 before the training with a signal; the other waits as in a collective."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def setup(self, trainer, pl_module, stage):
        if trainer.global_rank == 1:
            if self.signum != signal.SIGKILL:
                signal.signal(self.signum, signal.SIG_DFL)
            os.kill(os.getpid(), self.signum)
        time.sleep(600)


class LoseRank0(L.Callback):
    """Kill rank 0 from rank 1, which it has started, before they form a process group."""

    def __init__(self) -> None:
        if os.environ.get("LOCAL_RANK") == "1":
            os.kill(os.getppid(), signal.SIGKILL)


class CrashRank(L.Callback):
    """Raise a KeyError on rank 1 after the first step."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_rank == 1:
            raise KeyError("a bug of rank 1")


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


class HoldStage(L.Callback):
    """Hold the policy's forward passes in a stage of a rollout step until ``signalled`` exists.

    Afterwards the engine looks for a stop between any two of them. ``held`` says that a pass is
    held; with the file ``go`` none is.
    """

    def __init__(self, stage: str, step: int) -> None:
        self.stage = stage
        self.step = step

    def on_train_start(self, trainer, pl_module):
        def hold(*_):
            running = pl_module.events.running
            is_here = running is not None and running.name == self.stage
            if is_here and pl_module.rollout_step == self.step and not Path("go").exists():
                engine.LOOK_SECONDS = 0.0
                Path(f"held{trainer.global_rank}").touch()
                while not Path("signalled").exists():
                    time.sleep(0.02)

        pl_module.policy.model.register_forward_pre_hook(hold)


class HoldAtStage(L.Callback):
    """Hold each rank where a stage of a rollout step begins until ``signalled`` exists.

    ``held0`` and so on say that a rank is held; with the file ``go`` none is.
    """

    def __init__(self, stage: str, step: int) -> None:
        self.stage = stage
        self.step = step

    def on_stage_start(self, trainer, pl_module, name):
        is_here = name == self.stage and pl_module.rollout_step == self.step
        if is_here and not Path("go").exists():
            Path(f"held{trainer.global_rank}").touch()
            while not Path("signalled").exists():
                time.sleep(0.02)


class HeldReward(ShareOfLowBytes):
    """Gives no score from a call on, on one rank or on all, until the file ``go`` exists."""

    def __init__(self, call: int, rank: int | None = None, **settings) -> None:
        super().__init__(**settings)
        self.call = call
        self.rank = rank
        self._num_calls = 0

    def score(self, prompt, completion):
        self._num_calls += 1
        while self._is_due() and not Path("go").exists():
            Path(f"held{get_rank()}").touch()
            self.hold()
        return super().score(prompt, completion)

    def _is_due(self) -> bool:
        return self._num_calls > self.call and self.rank in (None, get_rank())

    def hold(self) -> None:
        time.sleep(0.02)


class DownReward(HeldReward):
    """Raises ConnectionError where `HeldReward` would wait."""

    def hold(self) -> None:
        raise ConnectionError("the judge is down")


class SilenceServers(L.Callback):
    """Make the run's servers answer nothing at the weight update of a step; ``held`` says so."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_stage_start(self, trainer, pl_module, name):
        is_here = name == "weight_sync" and pl_module.rollout_step == self.step
        if is_here and not Path("go").exists():
            for server in launched_servers():
                os.kill(server.pid, signal.SIGSTOP)
            Path(f"held{trainer.global_rank}").touch()


class SlowReward(ShareOfLowBytes):
    """Needs a quarter of a second for each completion, until the watchdog has said so."""

    def score(self, prompt, completion):
        if "is slow but advances" not in Path("run/run.log").read_text():
            time.sleep(0.25)
        return super().score(prompt, completion)


class DeadlockedReward(ShareOfLowBytes):
    """Waits from a call on for a lock that nobody releases."""

    def __init__(self, call: int, **settings) -> None:
        super().__init__(**settings)
        self.call = call
        self._num_calls = 0
        self._lock = threading.Lock()

    def score(self, prompt, completion):
        self._num_calls += 1
        if self._num_calls == self.call:
            self._lock.acquire()
            self._lock.acquire()
        return super().score(prompt, completion)


class DeadlockMainThread(L.Callback):
    """Wait after a step, on one rank or on all, for a lock that nobody releases.

    ``held0`` and so on say that a rank is stuck. Its watchdog ends it long before that of a rank
    that waits for it would, unless both have the same patience.
    """

    def __init__(
        self, step: int, rank: int | None = None, patience_seconds: float | None = None
    ) -> None:
        self.step = step
        self.rank = rank
        self.patience_seconds = patience_seconds

    def on_train_batch_end(self, trainer, pl_module, *_):
        is_stuck = self.rank in (None, trainer.global_rank)
        watchdog.STOP_SECONDS = 60.0 if not is_stuck else 1.0 if self.rank is None else 10.0
        if self.patience_seconds is not None:
            watchdog.STOP_SECONDS = self.patience_seconds
        if pl_module.rollout_step == self.step and is_stuck:
            Path(f"held{trainer.global_rank}").touch()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
