"""Rewards of what a completion says, and their scores."""

import asyncio

from tiny import completion

from lit_grpo.rewards import Reward


def texts(*rows):
    return [[completion(text=text) for text in row] for row in rows]


def outcomes(batch, name):
    return [[str(score.outcome) for score in group.scores[name]] for group in batch.groups]


class Value(Reward):
    """The text as a number; raises if it is not one."""

    def score(self, prompt, completion):
        return float(completion.text)


class AsyncValue(Reward):
    async def score(self, prompt, completion):
        await asyncio.sleep(0)
        return float(completion.text)


class Fading(Reward):
    """Give nothing after the first four completions."""

    num_scored = 0

    def score(self, prompt, completion):
        self.num_scored += 1
        return float(self.num_scored <= 4)


class Contains(Reward):
    def score(self, prompt, completion):
        return float("x" in completion.text)


class Siblings(Reward):
    async def score_group(self, prompt, completions):
        return [1.0] * len(completions)
