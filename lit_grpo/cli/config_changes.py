"""Compare the config of a resumed run with the one that it was started with.

A change of what is learned, from which data or in which order makes it a different run, and is
refused unless the user allows it. Everything else is applied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_grpo.types import UserError

IGNORED = re.compile(r"run_dir|ckpt_path|allow_changes")
"""Keys that are not about the training."""

HARMLESS = re.compile(
    r"trainer\..*"
    r"|model\.(engine|outage|evaluation|optimizer\.init_args|lr_schedule|warmup_steps)\b.*"
    r"|model\.update\.max_tokens_per_micro_batch"
    r"|model\.policy\.(gradient_checkpointing|compile|attn_implementation|merge_lora)"
    r"|model\.rewards\.\d+\.init_args\.(.*\.)?(limits\..*|cache|timeout_seconds|num_retries|on_error)"
    r"|data\.init_args\.(validation|test|validation_batch_size)"
)
"""Keys that may change during a run: how it is executed and evaluated, and how fast it learns."""

NOT_SET = "(not set)"
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from that of the run."""

    key: str
    before: object
    after: object

    @property
    def is_harmless(self) -> bool:
        return HARMLESS.fullmatch(self.key) is not None

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def find_changes(saved: Path, config: str) -> list[Change]:
    """Return the keys of a config, given as YAML, that differ from a saved config.

    A key of the saved config's own level that only the new one has is at the default of a later
    release, and is no change.
    """
    before, after = (
        dict(_leaves(yaml.safe_load(text) or {})) for text in (saved.read_text(), config)
    )
    keys = [key for key in before if not IGNORED.fullmatch(key)]
    return [
        Change(key, before[key], after.get(key, NOT_SET))
        for key in keys
        if before[key] != after.get(key, NOT_SET)
    ]


def refuse_changes(run_dir: Path, changes: Sequence[Change]) -> None:
    """Check that no change makes it a different run.

    Raises:
        UserError: at least one does.
    """
    if refused := [change for change in changes if not change.is_harmless]:
        raise UserError(
            f"{run_dir} was trained with other settings, and resuming with these would make it a "
            f"different run: {'; '.join(map(str, refused))}. Go on with its own settings: "
            f"lit-grpo fit {run_dir}. Or add --allow_changes to change them from here on."
        )


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield each dotted key and its value; the items of a list of mappings have numbers as keys."""
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(node, Mapping):
        children = list(node.items())
    elif isinstance(node, list) and any(isinstance(one, Mapping) for one in node):
        children = list(enumerate(node))
    if not children:
        yield key.replace("model.init_args.", "model.", 1), node
    for name, child in children:
        yield from _leaves(child, f"{key}.{name}" if key else str(name))


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
