"""Rewards as users write them, some of which execute the completion."""

from __future__ import annotations

import os
from pathlib import Path

from lit_grpo.rewards import Reward


class RunCode(Reward):
    """Execute the completion; the reward is what it leaves in ``value``."""

    def __init__(self, factor: float = 1.0, **settings):
        super().__init__(**settings)
        self.factor = factor

    def score(self, prompt, completion):
        scope = {"prompt": prompt, "process": os.getpid()}
        exec(completion.text, scope)
        value = scope["value"]
        return self.factor * value if isinstance(value, float) else value


class Longest(Reward):
    """1 for the longest completion of a group; crashes or raises on these texts."""

    def score_group(self, prompt, completions):
        if any(one.text == "crash" for one in completions):
            os._exit(7)
        if any(one.text == "raise" for one in completions):
            raise ValueError("on purpose")
        longest = max(len(one.text) for one in completions)
        return [float(len(one.text) == longest) for one in completions]


class LongerOfTwo(Longest):
    @property
    def siblings_per_call(self):
        return 2


class RecordsHooks(Reward):
    """Record which process ran which hook."""

    def __init__(self, file: str, **settings):
        super().__init__(**settings)
        self.file = Path(file)

    def note(self, what):
        with self.file.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    async def start(self):
        self.note("start")

    def check(self, prompts):
        self.note("check")
        if any(one.answer is None for one in prompts):
            raise ValueError("every prompt needs tests")

    def score(self, prompt, completion):
        self.note("score")
        return 1.0

    def close(self):
        self.note("close")


class NeedsSandbox(Reward):
    def start(self):
        raise FileNotFoundError("no sandbox at nowhere/sandbox")

    def score(self, prompt, completion):
        return 1.0


class NeedsKey(Reward):
    """Read a key of a service when it starts."""

    def start(self):
        self.key = os.environ["KEY_OF_A_SERVICE"]

    def score(self, prompt, completion):
        return 1.0


class Constant(Reward):
    """Give every completion the same value."""

    def __init__(self, value: float, **settings) -> None:
        super().__init__(**settings)
        self.value = value

    def score(self, prompt, completion):
        return self.value


class HoldsLambda(RunCode):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.clean = lambda text: text.strip()


class HasState(RunCode):
    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state):
        pass


class IsAsync(Reward):
    async def score(self, prompt, completion):
        return 1.0


def runs(data_source, solution_str, ground_truth, extra_info=None, points=1.0):
    """A reward function in verl's form."""
    scope: dict = {}
    exec(solution_str, scope)
    return {"score": points * float(scope["value"] == ground_truth)}


def lengths(prompts, completions, **columns):
    """A reward function in TRL's form."""
    return [float(len(text)) for text in completions]
