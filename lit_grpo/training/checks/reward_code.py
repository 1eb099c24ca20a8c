"""Recognise the code of a user's rewards, so that a resumed run can tell if it has changed."""

from __future__ import annotations

import inspect
from typing import Any
from zlib import crc32

from lit_grpo.rewards import FunctionReward, ProcessReward, Reward
from lit_grpo.types.functions import defined_at

NOT_USERS = ("lit_grpo", "builtins", "abc", "typing")


def describe_code(reward: Reward) -> str | None:
    """Return a checksum of the source of a user's function or class; None if there is none to read.

    It covers the function, or the class and its bases, but not what they call: the rest
    of a script may change without a change of the reward.
    """
    if isinstance(reward, ProcessReward):
        return describe_code(reward.reward)
    of_function = [defined_at(reward.function)[0]] if isinstance(reward, FunctionReward) else []
    sources = "".join(map(_users_source, [*of_function, *type(reward).__mro__]))
    return f"{crc32(sources.encode(errors='surrogatepass')):08x}" if sources else None


def _users_source(named: Any) -> str:
    if (named.__module__ or "builtins").partition(".")[0] in NOT_USERS:
        return ""
    try:
        return inspect.getsource(named)
    except (OSError, TypeError, SyntaxError):  # a class of a notebook, or not written in Python
        return ""
