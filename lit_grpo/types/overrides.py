"""Refuse constructors and hooks of the user's that leave out those of the class they extend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType

from lit_grpo.types.errors import UserError
from lit_grpo.types.functions import assigned_attributes, defined_at

OURS = "lit_grpo."
OTHER_HOOKS = (
    *("setup", "teardown", "state_dict", "load_state_dict"),
    *("training_step", "validation_step", "test_step"),
)
PREFIXES = ("on_", "configure_")
WITHOUT_CALL = ("configure_callbacks",)
"""Hooks whose own part is only a check."""


def check_made(one: object) -> None:
    """Check that the constructor of lit-grpo's class has run for an object of a subclass.

    It has if most attributes that it assigns are there; a subclass may have some of the same name.

    Raises:
        UserError: it has not, so the object lacks what lit-grpo reads.
    """
    kind = type(one)
    for ours in (base for base in kind.__mro__ if _is_ours(base) and "__init__" in vars(base)):
        assigned = assigned_attributes(vars(ours)["__init__"])
        missing = [name for name in assigned if not _has(one, name)]
        if 2 * len(missing) > len(assigned):
            owner = _without_call(kind, ours)
            must = f"{owner.__name__}.__init__ must call super().__init__"
            if not issubclass(owner, ours):  # a mixin, which may be another's
                must = f"{kind.__name__} needs an __init__ that calls {ours.__name__}.__init__"
            raise UserError(
                f"{must}: the constructor of {ours.__name__} has not run, since that of "
                f"{owner.__name__} calls no other (without it the object lacks what lit-grpo "
                f"reads, such as {missing[0]}). Add the call as its first line, with the arguments "
                "that it needs."
            )


def _has(one: object, name: str) -> bool:
    """Return whether an object has an attribute; no property of the user's is run."""
    forward = getattr(type(one), "__getattr__", None)
    if forward is not None and not forward.__module__.startswith("torch."):
        return hasattr(one, name)  # which wraps another object
    own = getattr(one, "__dict__", {})
    parts = (own.get(part) or {} for part in ("_modules", "_parameters", "_buffers"))
    return hasattr(type(one), name) or any(name in held for held in (own, *parts))


def _without_call(kind: type, ours: type) -> type:
    """Return the class whose constructor most likely leaves out the call of one of lit-grpo's."""
    for base in kind.__mro__[: kind.__mro__.index(ours)]:
        _, code = defined_at(vars(base).get("__init__", object.__init__))
        if code is not None and not _calls_overridden("__init__", code, base):
            return base
    return kind


def check_overrides(kind: type, instead: Mapping[str, str]) -> None:
    """Check that the hooks of a subclass call those that they override.

    Lightning's own do nothing, so that its users are used to hooks without the call.

    Args:
        kind: The class of a module or of a data module.
        instead: Hook -> what to do rather than override it.

    Raises:
        UserError: one does not, so a part of the run would be left out without a word.
    """
    for name, owner, overridden in _overrides(kind):
        _, code = defined_at(vars(owner)[name])
        if code is not None and not _calls_overridden(name, code, kind):
            raise UserError(
                f"{owner.__name__}.{name} must call super().{name} (it overrides "
                f"{overridden.__name__}.{name}, which does a part of the run that would be left "
                f"out). Add the call{instead.get(name, ', or do this in a callback')}."
            )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(OURS)


def _overrides(kind: type) -> Iterator[tuple[str, type, type]]:
    """Yield the hooks of the user's classes that override one of lit-grpo's: name, both classes.

    The latter is the class that the user's extends, which may inherit the hook.
    """
    ours = [one for one in kind.__mro__ if _is_ours(one)]
    chosen: set[str] = set()  # for which a class has named lit-grpo's own: no other is called
    for owner in kind.__mro__[: kind.__mro__.index(ours[0])]:
        hooks = {name: one for name, one in vars(owner).items() if _is_hook(name) and callable(one)}
        for name in hooks.keys() - chosen:
            overridden = next((one for one in ours if name in vars(one)), None)
            if str(getattr(hooks[name], "__module__", "")).startswith(OURS):
                chosen.add(name)
            elif overridden is not None:
                yield name, owner, next(one for one in ours if issubclass(one, overridden))


def _is_hook(name: str) -> bool:
    return name not in WITHOUT_CALL and (name in OTHER_HOOKS or name.startswith(PREFIXES))


def _calls_overridden(name: str, code: CodeType, kind: type) -> bool:
    """Return whether a hook names itself, and ``super`` or a class of its object."""
    names = {*_names_in(code)}
    return name in names and not names.isdisjoint(
        {"super", *(one.__name__ for one in kind.__mro__)}
    )


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals in a function and the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
