"""Rewards and callbacks of ``scenarios.py``: they fail on purpose."""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from _toy_judge import ToyJudge
from failing_engine import find_process

from lit_grpo.rewards import Reward
from lit_grpo.types import Completion, Prompt

SIGNALLED = "signalled"
"""File with the ids of the processes that a scenario has killed or stopped."""
JUDGE_VARIABLE = "SCENARIO_JUDGE"
"""Environment variable with the address of the judge, for what ends it."""


class ShareOfDigits(Reward):
    """A reward with a signal from the first step on."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        text = completion.text
        return (1 + sum(one.isdigit() for one in text)) / (1 + len(text))


class Constant(Reward):
    """Score every completion the same."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return 0.5


class Never(Reward):
    """Look for a format that no completion has."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float("\\boxed{" in completion.text)


class Opposite(ShareOfDigits):
    """Cancel the other reward."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return -super().score(prompt, completion)


class NeedsColumn(Reward):
    """Read a column that the rows do not have."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(prompt.columns["difficulty"])


class Deadlock(ShareOfDigits):
    """Wait in the fourth step for something that never happens."""

    _num_scores = 0

    def score(self, prompt: Prompt, completion: Completion) -> float:
        self._num_scores += 1
        if self._num_scores > 3 * 32:
            threading.Event().wait()
        return super().score(prompt, completion)


class Slow(ShareOfDigits):
    """Take a while for every completion."""

    def score(self, prompt: Prompt, completion: Completion) -> float:
        time.sleep(0.3)
        return super().score(prompt, completion)


class At(L.Callback):
    """Do something once, when a rollout step begins."""

    def __init__(self, step: int = 3) -> None:
        self.step = step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.rollout_step == self.step:
            self.act(pl_module)

    def act(self, module: Any) -> None:
        raise NotImplementedError


class NaNGradients(L.Callback):
    """Make the gradients of some rollout steps NaN, or those from one on."""

    def __init__(self, first: int = 3, last: int = 3) -> None:
        self.first = first
        self.last = last

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        parameter = pl_module.policy.trainable_parameters()[0]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            is_spoiled = self.first <= pl_module.rollout_step <= self.last
            return gradient * math.nan if is_spoiled else gradient

        parameter.register_hook(spoil)


class JudgeDown(At):
    """Let the judge of the run answer nothing from now on."""

    def act(self, module: Any) -> None:
        ToyJudge(os.environ[JUDGE_VARIABLE]).set(is_down=True)


class ServerDown(At):
    """Kill the main process of the inference server."""

    def act(self, module: Any) -> None:
        find_process(os.getpid(), "main process").kill()


class NaNWeights(At):
    """Spoil a weight."""

    def act(self, module: Any) -> None:
        module.policy.trainable_parameters()[0].data.view(-1)[0] = math.nan


class LittleMemory(L.Callback):
    """Leave the process almost no memory for the update of a rollout step."""

    def __init__(self, step: int = 3) -> None:
        self.step = step

    def on_stage_start(self, trainer: L.Trainer, pl_module: Any, name: str) -> None:
        if pl_module.rollout_step == self.step and name == "micro_batch":
            used = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**19, resource.RLIM_INFINITY))

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class SignalToWandb(At):
    """Kill or stop the process of wandb's service."""

    def __init__(self, step: int = 3, name: str = "SIGKILL") -> None:
        super().__init__(step)
        self.name = name

    def act(self, module: Any) -> None:
        for child in psutil.Process().children(recursive=True):
            if "wandb" in " ".join(child.cmdline()):
                os.kill(child.pid, signal.Signals[self.name])
                with Path(SIGNALLED).open("a") as file:
                    file.write(f"{child.pid}\n")
