"""End a run on exceptions of the user's hooks that Lightning's loops or Python would misread.

Lightning's loops take a StopIteration for the end of the data: they would go on without the rest of
the step, or repeat it for ever. SystemExit would end the process without a reason or a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lit_grpo.stopping import exit_code_of_error, is_of_signal
from lit_grpo.types.functions import defined_at, users_line

STEPS = ("training_step", "validation_step", "test_step")
LIBRARIES = ("lit_grpo.", "lightning.", "torch.")
"""Packages whose hooks are no code of the user's."""


def guard_hooks(owner: Any) -> None:
    """Wrap the hooks of a callback or a module that are the user's, and its steps.

    Steps are always wrapped, because they call the user's rewards and functions.
    """
    hooks = [name for name in dir(owner) if name.startswith("on_")]
    for name in (*hooks, *STEPS):
        hook = getattr(owner, name, None)
        if not callable(hook) or hasattr(hook, "is_guard"):
            continue
        is_users = not str(defined_at(hook)[0].__module__).startswith(LIBRARIES)
        if is_users or name in STEPS:
            setattr(owner, name, _guarded(hook, f"{type(owner).__name__}.{name}", is_users))


def _guarded(hook: Callable[..., Any], name: str, is_users: bool) -> Callable[..., Any]:
    @wraps(hook)
    def guarded(*arguments: Any, **keywords: Any) -> Any:
        try:
            return hook(*arguments, **keywords)
        except StopIteration as error:
            raise RuntimeError(
                f"StopIteration in {name}: an iterator has no further item. Give next() a second "
                "argument, which it returns then."
            ) from error
        except SystemExit as error:
            if is_of_signal(exit_code_of_error(error)):
                raise
            raise RuntimeError(
                f"{name} left by sys.exit({error.code!r}), without a checkpoint. To stop a run "
                "with one, call lit_grpo.stopping.stop_run; for an error, raise an exception."
            ) from error
        except Exception as error:
            if is_users and users_line(error) and not hasattr(error, "__notes__"):
                error.add_note(_about(name, error, arguments))
            raise

    guarded.is_guard = True  # type: ignore[attr-defined]
    return guarded


def _about(name: str, error: Exception, arguments: tuple[Any, ...]) -> str:
    """Return the note below the traceback of a hook of the user's."""
    said = f"Raised in the hook {name}."
    outputs = next((one for one in arguments if isinstance(one, dict)), None)
    if isinstance(error, KeyError) and outputs and error.args[0] not in [*outputs]:
        keys = ", ".join(map(repr, outputs))
        said += f" The dict that it was given has the keys {keys}."
    return said
