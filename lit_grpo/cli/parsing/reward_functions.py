"""Take the path of a function where a config names a reward, as Python takes the function."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

import yaml
from jsonargparse._util import NestedArg

from lit_grpo.cli.parsing.merging import REWARDS
from lit_grpo.rewards import Reward

EVALUATION, ACCURACY = "model.evaluation", "accuracy"

_COLON = re.compile(r"[\w./~-]+:[A-Za-z_]\w*")
"""``module:function`` or ``path/to/file.py:function``, a form that no class path has."""
_FILE = re.compile(r"[\w./~-]+\.py")
"""A path without a function; `FunctionReward` then lists the functions of the file."""
_DOTTED = re.compile(r"(\w+\.)+\w+")


def take_functions(parser: Any) -> None:
    """Let `model.rewards` and `model.evaluation.accuracy` of a parser accept functions."""
    for action in parser._actions:
        if action.dest == REWARDS:
            _wrap(action, with_functions)
        elif action.dest == EVALUATION:
            _wrap(action, _with_accuracy)


def _wrap(action: Any, change: Callable[..., Any]) -> None:
    check = action._check_type

    def check_type(value: Any, append: bool = False, cfg: Any = None, mode: Any = None) -> Any:
        return check(change(value, is_item=append), append=append, cfg=cfg, mode=mode)

    action._check_type = check_type  # for files and the command line alike


def _with_accuracy(value: Any, *, is_item: bool) -> Any:
    """Return a value of `model.evaluation` with functions as rewards in its accuracy."""
    if isinstance(value, NestedArg) and value.key == ACCURACY:
        return value._replace(val=with_functions(value.val, is_item=True))
    if not isinstance(value, Mapping):
        return value
    changed = dict(value)
    if ACCURACY in changed:
        changed[ACCURACY] = with_functions(changed[ACCURACY], is_item=True)
    if isinstance(changed.get("init_args"), Mapping):
        changed["init_args"] = _with_accuracy(changed["init_args"], is_item=is_item)
    return changed


def with_functions(value: Any, *, is_item: bool = False) -> Any:
    """Return a value of `model.rewards` with every path of a function as a ``FunctionReward``.

    Args:
        value: What a config file or the command line gives.
        is_item: Whether the value may be one item instead of a list.
    """
    given = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError, yaml.YAMLError):  # which the parser reports
            given = yaml.safe_load(value)
    if isinstance(given, list):
        items = [_as_reward(one) for one in given]
        return value if items == given else items
    if isinstance(value, str) and _FILE.fullmatch(value) and not is_item:
        return [_as_reward(value)]
    return _as_reward(value) if is_item else value


def _as_reward(item: Any) -> Any:
    if not isinstance(item, str) or not _names_function(item):
        return item
    return {"class_path": "FunctionReward", "init_args": {"function": item}}


def _names_function(path: str) -> bool:
    if _COLON.fullmatch(path) or _FILE.fullmatch(path):
        return True
    if not _DOTTED.fullmatch(path):
        return False
    try:
        found = pkgutil.resolve_name(path)
    except Exception:  # of the user's module; the parser imports it again and reports it
        return False
    return callable(found) and not isinstance(found, type | Reward) and not _makes_reward(found)


def _makes_reward(function: Any) -> bool:
    """Return whether a function returns a reward, which the parser takes like its class."""
    hints: dict[str, Any] = {}
    with suppress(NameError, TypeError, AttributeError):
        hints = get_type_hints(function)
    kind = hints.get("return")
    return isinstance(kind, type) and issubclass(kind, Reward)
