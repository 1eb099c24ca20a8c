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

from lit_grpo.training.checks.resume_changes import HARMLESS as HARMLESS_IN_PYTHON
from lit_grpo.types import UserError

IGNORED = re.compile(r"run_dir|ckpt_path|allow_changes")
"""Keys that are not about the training."""

HARMLESS = re.compile(
    r"trainer\..*"
    r"|model\.(engine|outage|evaluation|optimizer\.init_args|lr_schedule|warmup_steps)\b.*"
    rf"|model\.({'|'.join(map(re.escape, HARMLESS_IN_PYTHON))})"
    r"|model\.policy\.(gradient_checkpointing|packing|compile|attn_implementation|merge_lora)"
    r"|model\.rewards\.\d+\.init_args\.(.*\.)?(limits\..*|cache|timeout_seconds|num_retries|on_error)"
    r"|data\.init_args\.(sources\.\w+\.data\.init_args\.)?(validation|test|validation_batch_size)"
)
"""Keys that may change during a run: how it is executed and evaluated, and how fast it learns."""

HOLDING_OUT = re.compile(
    r"data\.(class_path|init_args\.(.*\.)?(train|where|validation_size|train_size|num_digits))"
)
"""Keys that decide which rows are held out of the training data."""

MODELS = ("model.policy.path", "model.teacher.path")
"""Keys of models that a resumed run may read again."""

NOT_SET = "(not set)"
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from the run's."""

    key: str
    before: object
    after: object

    @property
    def is_harmless(self) -> bool:
        return HARMLESS.fullmatch(self.key) is not None

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def find_changes(before: str, after: str) -> list[Change]:
    """Return the keys whose values differ between two saved configs.

    If another release wrote ``before``, a key that only ``after`` has is at the default of the
    present one, and is not a change. Nor are the arguments of a class that is another one.
    """
    release, other = (re.match(r"# lit-grpo==.*", text) for text in (before, after))
    is_same_release = release is not None and other is not None and release[0] == other[0]
    changes = [*_differences(yaml.safe_load(before), yaml.safe_load(after))]
    other_classes = [one.key for one in changes if one.key.endswith(".class_path")]
    of_others = tuple(f"{key.removesuffix('class_path')}init_args." for key in other_classes)
    return [
        change
        for change in changes
        if not change.key.startswith(of_others)
        and not IGNORED.fullmatch(change.key)
        and (is_same_release or change.before is not NOT_SET or _is_item(change.key))
    ]


def refuse_changes(run_dir: Path, changes: Sequence[Change], resume_command: str) -> None:
    """Check that no change makes it a different run.

    Args:
        resume_command: The command that resumes it without changes.

    Raises:
        UserError: at least one does.
    """
    if refused := [change for change in changes if not change.is_harmless]:
        is_moved = any(change.key in MODELS for change in refused)
        moved = " (a model that was only moved too: its weights are compared)" if is_moved else ""
        others = [str(change) for change in changes if change.is_harmless]
        also = f" Other changes could be applied: {'; '.join(others)}." if others else ""
        raise UserError(
            f"{run_dir} was trained with other settings, and resuming with these would make it a "
            f"different run: {'; '.join(map(str, refused))}.{also} Go on with its own settings: "
            f"{resume_command}. Or add --allow_changes to change them from here on{moved}."
        )


def describe_other_holdout(changes: Sequence[Change]) -> str:
    """Return a warning if rows of an evaluation may have been trained on; empty if none may."""
    changed = [str(change) for change in changes if HOLDING_OUT.fullmatch(change.key)]
    if not changed:
        return ""
    return (
        "the run held out other rows, so that it may have been trained on those that are held out "
        f"here, and then their accuracy is too high ({'; '.join(changed)}). Set data.validation or "
        "data.test to rows that it was not trained on."
    )


def refuse_seed_alone(changes: Sequence[Change]) -> None:
    """Check that the seeds that count change with ``seed_everything``.

    Raises:
        UserError: they have values of their own, as in every saved config.
    """
    changed = {change.key for change in changes}
    if "seed_everything" in changed and not any(key.endswith(".seed") for key in changed):
        raise UserError(
            "seed_everything alone changes nothing here: model.seed and the seeds of the data have "
            "values of their own in the run's config. Set model.seed and data.seed."
        )


def _differences(before: Any, after: Any, key: str = "") -> Iterator[Change]:
    """Yield where two nodes differ; the items of a list of mappings have numbers as keys."""
    old, new = _children(before), _children(after)
    if old is None or new is None:
        if before != after:
            yield Change(key.replace("model.init_args.", "model.", 1), before, after)
        return
    for name in old | new:
        child = f"{key}.{name}" if key else str(name)
        yield from _differences(old.get(name, NOT_SET), new.get(name, NOT_SET), child)


def _children(node: Any) -> dict[Any, Any] | None:
    if isinstance(node, list) and any(isinstance(one, Mapping) for one in node):
        return dict(enumerate(node))
    return dict(node) if isinstance(node, Mapping) else None


def _is_item(key: str) -> bool:
    """Return whether the key names an item of a list, such as ``model.rewards.1``."""
    return key.rpartition(".")[2].isdecimal()


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
