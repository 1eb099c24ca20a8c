"""Refuse hooks of the user's that replace a part of the run without calling it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType

from lit_grpo.types.errors import UserError
from lit_grpo.types.functions import defined_at

OURS = "lit_grpo."
STAGES = ("setup", "teardown", "training_step", "state_dict", "load_state_dict")
PREFIXES = ("on_", "configure_")
WITHOUT_CALL = ("configure_callbacks",)
"""Hooks whose own part is only a check."""


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
        if code is not None and name not in _names_in(code):
            raise UserError(
                f"{owner.__name__}.{name} must call super().{name} (it overrides "
                f"{overridden.__name__}.{name}, which does a part of the run that would be left "
                f"out). Add the call{instead.get(name, ', or do this in a callback')}."
            )


def _overrides(kind: type) -> Iterator[tuple[str, type, type]]:
    """Yield the hooks of the user's classes that override one of lit-grpo's: name, both classes."""
    users = [one for one in kind.__mro__ if not one.__module__.startswith(OURS)]
    ours = [one for one in kind.__mro__ if one.__module__.startswith(OURS)]
    for owner in users[: kind.__mro__.index(ours[0])]:
        for name, value in vars(owner).items():
            overridden = next((one for one in ours if name in vars(one)), None)
            is_hook = name in STAGES or name.startswith(PREFIXES)
            if is_hook and name not in WITHOUT_CALL and callable(value) and overridden:
                yield name, owner, overridden


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of attributes and globals in a function and the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
