"""The file ``prompt_format.json`` of a final model: how its training prompts were formatted.

A run that starts from the model warns if its own prompts have another format.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)

FILE = "prompt_format.json"
SETTINGS = ("template", "system_prompt", "chat", "chat_template_kwargs")
"""Settings of the data that decide how the policy reads a row."""
IS_CONVERSATION = "is_conversation"
"""Key of whether the prompts are conversations: by ``chat``, or as lists of messages."""
KINDS = ("PromptData", "StreamData", "AdditionData")
"""Data whose settings these are."""


PROMPT_FORMAT = "prompt_format"
"""Key of the format in a checkpoint."""


def write_prompt_format(directory: Path, settings: Mapping[str, Any] | None) -> None:
    """Write the format of a training run's prompts next to its model.

    Args:
        settings: As from `format_of`.
    """
    if settings is not None:
        (directory / FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@rank_zero_only
def warn_of_other_format(trainer: L.Trainer, path: str | None) -> None:
    """Warn if a policy was trained on prompts of another format than this run's.

    Args:
        path: Path of the initial policy.
    """
    now = format_of(trainer)
    then = _read(Path(path) / FILE) if path is not None else None
    if now is None or then is None:
        return
    if changed := _changes(then, now):
        log.warning(
            "the policy %s was trained on prompts of another format than those of this run "
            "(%s), so that it may have to learn the new one first. Unless both give the same "
            "prompts, as rows that are formatted already do, set them as in %s.",
            *(path, "; ".join(changed), Path(path or "", FILE)),
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two formats."""
    kinds = [one.get(IS_CONVERSATION) for one in (then, now)]
    is_known = None not in kinds
    changed = [
        f"data.{name}: {then.get(name)!r} -> {now[name]!r}"
        for name in SETTINGS
        if (then.get(name) or None) != (now[name] or None) and not (is_known and name == "chat")
    ]
    if is_known and kinds[0] != kinds[1]:
        words = ["conversations" if kind else "plain text" for kind in kinds]
        changed.append(f"{' -> '.join(words)}; data.chat makes text a conversation")
    return changed


def format_of(trainer: L.Trainer) -> dict[str, Any] | None:
    """Return the format of a training run's prompts; None if the data has no such settings."""
    data: Any = getattr(trainer, "datamodule", None)
    if type(data).__name__ not in KINDS:
        return None
    settings = {name: getattr(data.prompt_format, name) for name in SETTINGS}
    loader: Any = getattr(trainer, "train_dataloader", None)
    prompts = loader.some_prompts() if hasattr(loader, "some_prompts") else ()
    return settings | {
        "chat_template_kwargs": dict(settings["chat_template_kwargs"]),
        IS_CONVERSATION: next((one.messages is not None for one in prompts), None),
    }


def _read(path: Path) -> Mapping[str, Any] | None:
    """Return the settings in a file; None for an id on the Hub and for models from elsewhere."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, Mapping) else None
