"""An argument parser that refuses every unknown key."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser, Namespace


class StrictParser(ArgumentParser):
    """Also refuse an unknown key with ``{}`` under it: merging drops it before it is checked."""

    def _apply_actions(
        self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any
    ) -> Namespace:
        applied = super()._apply_actions(cfg, parent_key, *args, **kwargs)
        sections = self.groups or {}
        typed = [one.dest for one in self._actions if one.dest not in sections]
        for name, value in applied.items(branches=True):
            key = f"{parent_key}.{name}" if parent_key else name
            is_empty = isinstance(value, Namespace) and not vars(value)
            if is_empty and key not in sections and not any(_is_on_path(key, one) for one in typed):
                raise KeyError(f"Option '{key}' is not accepted")
        return applied


def _is_on_path(one: str, other: str) -> bool:
    """Return whether one key is the other, or contains it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
