"""From a path in a config to the function that it names, in a module or in a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_grpo.types import UserError


def load_function(path: str) -> Callable[..., Any]:
    """The function at ``module:function``, ``module.function`` or ``file.py:function``.

    Raises:
        ValueError: there is no such module, file or function.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name:
        raise UserError(
            f"function must be module:function or path/to/file.py:function, got {path!r} "
            "(it is imported from there). Set function in the init_args of FunctionReward."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [one for one in dir(module) if one[0] != "_"], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"function must exist, {place} has no function {name!r}.{hint}")
    return function


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise UserError(
            f"function must be in a module that can be imported, got {name!r} ({error}). Install "
            "it, or name the file: path/to/file.py:function."
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(
            f"function must be in a file that exists, got {path} (looked in {Path.cwd()})."
        )
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
