"""Import the reward function that a path names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from lit_grpo.types import UserError, setting_error
from lit_grpo.types.settings import list_some
from lit_grpo.types.spelling import did_you_mean

_SCORED = {"completions", "solution_str"}
"""Parameters of a reward function that hold what is scored."""


def load_function(path: str) -> Callable[..., Any]:
    """Import the function ``module:function``, ``module.function`` or ``file.py:function``.

    Raises:
        UserError: there is no such module, file or function, or the path names none.
    """
    if path.endswith(".py"):
        raise _names_no_function(path)
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name:
        rule = "module:function or path/to/file.py:function"
        raise setting_error("FunctionReward.init_args.function", rule, repr(path))
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        hint = did_you_mean(name, [one for one in dir(module) if one[0] != "_"])
        raise UserError(f"function must exist: {place} has no function {name!r}.{hint}")
    return cast(Callable[..., Any], function)


def _names_no_function(path: str) -> UserError:
    """Return the error for a file without a function, with those that it has."""
    _refuse_missing(Path(path))
    found = _functions_in(Path(path))
    has = f" It has {list_some(list(found), 5)}." if found else ""
    # Helpers may stand before the function that scores.
    best = max(found, key=lambda name: not found[name].isdisjoint(_SCORED), default="FUNCTION")
    return UserError(
        f"function must be path/to/file.py:function, got {path!r} (a file may have several)."
        f"{has} Write {path}:{best}."
    )


def _functions_in(path: Path) -> dict[str, set[str]]:
    """Return the public functions of a file with their parameters; none if it cannot be parsed."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return {}
    return {
        one.name: {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
        for one in body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name[0] != "_"
    }


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise UserError(
            f"function must be in a module that can be imported, got {name!r} ({error}). Install "
            "it, or name the file: path/to/file.py:function."
        ) from None


def _refuse_missing(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            f"function must be in a file that exists, got {path} (looked in {Path.cwd()}). "
            "Correct the path of the function."
        )


def _load_file(path: Path) -> ModuleType:
    _refuse_missing(path)
    name = f"{path.stem} at {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, since dataclasses and pickle look a module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
