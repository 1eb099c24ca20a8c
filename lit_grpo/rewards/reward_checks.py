"""Check a reward before a run: its settings, its methods and its state."""

from __future__ import annotations

import inspect
import re
from numbers import Real
from typing import get_args

from lit_grpo.rewards.reward import OnError, ReasoningView, Reward, setting_key
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.functions import unfit_signature, unused_arguments
from lit_grpo.types.overrides import check_made

_ARGUMENTS = {
    "score": ("prompt", "completion"),
    "score_group": ("prompt", "completions"),
    "start": (),
    "check": ("prompts",),
    "close": (),
}
"""Method that a subclass may define -> what it is called with."""


def check_settings(reward: Reward) -> None:
    """Check the settings that all rewards have.

    It is not part of ``__init__``, which a subclass may skip.

    Raises:
        UserError: a setting is out of range or dropped, or no method is overridden.
    """
    kind = type(reward)
    if not reward.is_grouped and kind.score is Reward.score:
        raise UserError(
            f"a reward must override score or score_group; {kind.__name__} has neither "
            "(there is nothing to call). Define score(self, prompt, completion)."
        )
    _check_signatures(reward)
    _refuse_half_a_state(kind)
    check_made(reward)
    _refuse_dropped_settings(kind)
    if not re.fullmatch(r"[\w.-]+", str(reward.name)):
        rule = "one or more letters, digits, '_', '-' and '.'"
        raise setting_error(
            setting_key(reward, "name"), rule, repr(reward.name), "it names metrics"
        )
    _refuse_class_attributes(reward)
    is_number = isinstance(reward.weight, Real) and not isinstance(reward.weight, bool)
    if not is_number or not abs(reward.weight) < float("inf"):
        raise setting_error(setting_key(reward, "weight"), "a finite number", repr(reward.weight))
    for setting, choices in (("on_error", OnError), ("reasoning", ReasoningView)):
        if (value := getattr(reward, setting)) not in get_args(choices):
            rule = "one of " + ", ".join(get_args(choices))
            raise setting_error(setting_key(reward, setting), rule, repr(value))
    only = reward.only_sources
    if only is not None and (isinstance(only, str) or not only):
        rule, why = "a list of sources, or null for all", "an empty one would score nothing"
        raise setting_error(setting_key(reward, "only_sources"), rule, repr(only), why)
    check_range(setting_key(reward, "timeout_seconds"), reward.timeout_seconds, above=0)
    check_range(setting_key(reward, "num_retries"), reward.num_retries, at_least=0)


def _refuse_half_a_state(kind: type[Reward]) -> None:
    """Check that a state that is saved is also restored.

    Raises:
        UserError: only one of the two methods is overridden.
    """
    names = ("state_dict", "load_state_dict")
    own = [name for name in names if getattr(kind, name) is not getattr(Reward, name)]
    if len(own) == 1:
        (missing,) = set(names).difference(own)
        raise UserError(
            f"a reward must override state_dict and load_state_dict together; {kind.__name__} has "
            f"no {missing} (a resumed run would go on without its state). Define it."
        )


def _refuse_dropped_settings(kind: type[Reward]) -> None:
    """Refuse a constructor of the user's that takes a setting of all rewards and never uses it.

    Raises:
        UserError: the class or one of its bases has one.
    """
    settings = inspect.signature(Reward).parameters
    classes = kind.__mro__[: kind.__mro__.index(Reward)]
    for one in (one for one in classes if "__init__" in vars(one)):
        unused = unused_arguments(vars(one)["__init__"])
        for name in (name for name in settings if name in unused):
            raise UserError(
                f"{one.__name__}.__init__ must pass {name} on, which it takes and does not use "
                f"(setting it would have no effect). Write super().__init__({name}={name}, "
                "...), or leave it to **settings: def __init__(self, ..., **settings): "
                "super().__init__(**settings)."
            )


def _refuse_class_attributes(reward: Reward) -> None:
    """Refuse settings that a class of the user's has and `Reward.__init__` has replaced.

    Raises:
        UserError: the class has one.
    """
    kind = type(reward)
    for setting in ("weight", "on_error", "timeout_seconds", "num_retries"):
        given, value = getattr(kind, setting), getattr(reward, setting)
        if given not in (value, getattr(Reward, setting)):
            raise UserError(
                f"{setting} must not be an attribute of a class, got {kind.__name__}.{setting} = "
                f"{given!r} (it has no effect: the reward has {value!r}). Set "
                f"{setting_key(reward, setting)} in the config, or call "
                f"super().__init__({setting}={given!r}) in {kind.__name__}.__init__."
            )


def _check_signatures(reward: Reward) -> None:
    """Check that the methods of a reward take what they are called with."""
    unused = "score" if reward.is_grouped else "score_group"
    for name, arguments in _ARGUMENTS.items():
        method = getattr(reward, name)
        if name == unused or unfit_signature(method, arguments) is None:
            continue
        whole = ", ".join(["self", *arguments])
        keyword = "async def" if inspect.iscoroutinefunction(method) else "def"
        raise UserError(
            f"{type(reward).__name__}.{name} must take {whole}, got "
            f"{name}{inspect.signature(getattr(type(reward), name))} (it is called with "
            f"{' and '.join(arguments) or 'nothing'}, by position). Define {keyword} "
            f"{name}({whole})."
        )
