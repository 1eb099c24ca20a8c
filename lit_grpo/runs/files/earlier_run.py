"""Notice that the run which trained the initial policy formatted its prompts in another way."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.runs.files.config import argument, read_config

log = logging.getLogger(__name__)

FORMAT = ("template", "system_prompt", "chat", "chat_template_kwargs")
"""Settings of the data that decide how a row is read by the policy."""
KINDS = ("PromptData", "StreamData", "AdditionData")
"""Data whose settings these are, as they are written in a config; `AdditionData` has the
defaults."""


@rank_zero_only
def warn_of_other_format(trainer: L.Trainer, path: str | None) -> None:
    """Warn if the run that has made the model was trained on prompts of another format.

    Args:
        path: Of the initial policy. If it is the ``final/`` of a run, the run's config is beside
            it, unless that was made in Python.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if path is None or not Path(path).is_dir():  # else an id on the Hub
        return
    config = Path(path).resolve().parent / "config.yaml"
    earlier = argument(read_config(config), "data")
    if type(data).__name__ not in KINDS or _kind(earlier) not in KINDS:
        return
    default = type(data.prompt_format)()
    then = {name: argument(earlier, name) or getattr(default, name) for name in FORMAT}
    now = {name: getattr(data.prompt_format, name) for name in FORMAT}
    changed = [
        f"{name}: {then[name]!r} -> {now[name]!r}"
        for name in FORMAT
        if (then[name] or None) != (now[name] or None)
    ]
    if changed:
        log.warning(
            "the policy %s was trained on prompts of another format than those of this run "
            "(data.%s), so that it may have to learn the new one first. Unless both give the same "
            "prompts, as rows that are formatted already do, set them as in %s.",
            *(path, "; data.".join(changed), config),
        )


def _kind(data: Any) -> str:
    """Return the name of a config's class of data."""
    path = data.get("class_path") if isinstance(data, Mapping) else None
    return str(path).rpartition(".")[2]
