"""Describe functions of the user's, and the errors that they raise."""

from __future__ import annotations

import dis
import inspect
import json
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any
from zlib import crc32

from lit_grpo.types.plain import bare_name, is_plain, plain_value

PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
MAX_SHOWN_CHARACTERS = 200


def undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or the object that is called in the end."""
    while isinstance(function, partial):
        function = function.func
    innermost: Callable[..., Any] = inspect.unwrap(function)
    return innermost


def defined_at(function: Callable[..., Any]) -> tuple[Any, CodeType | None]:
    """Return what a callable runs, without decorators, and its code; a builtin's code is None."""
    function = undecorated(function)
    named = function if hasattr(function, "__qualname__") else type(function).__call__
    return named, getattr(named, "__code__", None)


def assigned_attributes(method: Callable[..., Any]) -> list[str]:
    """Return the attributes that a method assigns, of any object, in their order."""
    _, code = defined_at(method)
    steps = () if code is None else dis.get_instructions(code)
    return list(dict.fromkeys(str(one.argval) for one in steps if one.opname == "STORE_ATTR"))


def carried_settings(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the plain values that a callable was made with, by their names.

    They are the arguments of a ``functools.partial``, the variables that a function has from the
    one around it, and the public attributes of an object. Other values are left out; a long one is
    replaced by a checksum.
    """
    return {name: _shortened(value) for name, value in _carried(function) if is_plain(value)}


def _carried(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a callable carries, after what the callable within it does."""
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        yield from _carried(inner)
    if isinstance(function, partial):
        yield from _carried(function.func)
        yield "function", bare_name(function.func)
        yield from ((f"argument {n}", value) for n, value in enumerate(function.args, 1))
        yield from function.keywords.items()
    elif isinstance(function, MethodType):
        yield from _carried(function.__func__)
        yield from _public_attributes(function.__self__)
    elif isinstance(function, FunctionType):
        yield from _closed_over(function)
        yield from _public_attributes(function)
    else:
        if isinstance(call := type(function).__call__, FunctionType):
            yield from _carried(call)
        yield from _public_attributes(function)


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents


def _public_attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(type(owner), "__dataclass_fields__", {})  # it may have slots
    found = {name: getattr(owner, name, None) for name in fields} | getattr(owner, "__dict__", {})
    yield from ((name, value) for name, value in found.items() if not name.startswith("_"))


def _shortened(value: Any) -> Any:
    """Return a plain value, or its length and checksum if it is long."""
    plain = plain_value(value)
    text = json.dumps(plain)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return plain
    return f"{len(text):,} characters (checksum {crc32(text.encode()):08x})"


def unfit_signature(
    function: Callable[..., Any], arguments: Sequence[str]
) -> inspect.Signature | None:
    """Return the signature if the function cannot take these positional arguments in this order.

    None if it can, or if the signature is unknown, as when it is not written in Python.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return signature
    named, called = (
        [one.rstrip("s") for one in names] for names in (signature.parameters, arguments)
    )
    taken = zip(named, called, strict=False)  # a parameter called completions is the completion
    is_swapped = any(name != argument and name in called for name, argument in taken)
    return signature if is_swapped else None


def unused_arguments(function: Callable[..., Any]) -> set[str]:
    """Return the named arguments of a function that its code never reads."""
    code = defined_at(function)[1]
    if code is None:
        return set()
    loaded = [one.argval for one in dis.get_instructions(code) if "LOAD" in one.opname]
    # From Python 3.13 on one instruction may load two variables.
    used = {name for one in loaded for name in (one if isinstance(one, tuple) else (one,))}
    return {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - used


def users_line(error: BaseException) -> str:
    """Return the last line of the user's own that raised an error: `` (my_rewards.py, line 3)``.

    Empty if no code is the user's: it is that of a package.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((PACKAGE, *_LIBRARIES, "<frozen")):
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""


def users_traceback(error: BaseException) -> str:
    """Return the traceback as text, from the user's first line on if it has one."""
    report = traceback.TracebackException.from_exception(error)
    is_users = [not frame.filename.startswith(PACKAGE) for frame in report.stack]
    first = is_users.index(True) if any(is_users) else 0
    report.stack = traceback.StackSummary.from_list(report.stack[first:])
    return "".join(report.format()).strip()
