"""One wording for every setting that is out of range, and the exception that users see."""

from __future__ import annotations


class UserError(ValueError):
    """The config, the data or the environment is wrong, and the message says what to change.

    The command line prints it as one line and exits with code 2, whenever it is raised. Any other
    exception during training is a crash, with a traceback.
    """


def refuse(key: str, rule: str, value: object, why: str = "") -> UserError:
    """Return the error for one setting: ``epochs must be >= 1, got 0 (why). Set model.epochs.``

    Args:
        key: Full key of the setting in a config, such as ``model.update.epochs``.
        rule: What it must be, such as ``>= 1``.
        value: What it is.
        why: What would go wrong otherwise.
    """
    name = key.removeprefix("model.").rpartition("init_args.")[2]
    reason = f" ({why})" if why else ""
    return UserError(f"{name} must be {rule}, got {value}{reason}. Set {key}.")


def check_range(
    key: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    why: str = "",
) -> None:
    """Check one number of a config; None is no limit and always passes.

    Args:
        key: As in `refuse`.
        at_least: The least value that passes.
        above: A value that is just too small.
        at_most: The largest value that passes.

    Raises:
        UserError: the value is outside, or not a number.
    """
    if value is None:
        return
    holds = (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
    )
    if not holds:
        raise refuse(key, _range_in_words(at_least, above, at_most), value, why)


def _range_in_words(at_least: float | None, above: float | None, at_most: float | None) -> str:
    if at_least is not None and at_most is not None:
        return f"from {at_least:g} to {at_most:g}"
    rules = [
        *([f">= {at_least:g}"] if at_least is not None else []),
        *(["positive" if above == 0 else f"> {above:g}"] if above is not None else []),
        *([f"<= {at_most:g}"] if at_most is not None else []),
    ]
    return " and ".join(rules)
