"""Whether a resumed run is still the one that wrote the checkpoint: its settings and its data.

The command line has compared the configs before. A script has none, and data are read again from
files that may have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Set
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from lit_grpo.policy.files.model_source import OTHER_POLICY, refuse_other_shape
from lit_grpo.policy.sharding import whole_shape
from lit_grpo.types import UserError
from lit_grpo.types.plain import bare_name, changed_settings, plain_value
from lit_grpo.types.saved_state import ALLOW_CHANGES

log = logging.getLogger(__name__)

HARMLESS = ("update.max_tokens_per_micro_batch", "update.max_skipped_steps")
"""Settings that may change during a run."""

REFERENCE = "policy.reference_model."
VALIDATION = "validation.rows"
"""Key of the description of the validation rows, which may change."""
REWARD_CODE = "rewards.code"
"""Key of the checksums of the rewards' code, which may change."""
OBJECTIVE_CODE = "objective.code"
"""Key of the checksums of the code of the user's functions in the objective, which may change."""
CARRIED = ".settings"
"""Suffix of keys for values bound to a user's function, such as arguments of a partial. They may
change, since an object may keep state."""


def plain_settings(owner: object, names: Iterable[str]) -> dict[str, Any]:
    """Return attributes as plain values; a dataclass's fields go under ``attribute.field``."""
    found: dict[str, Any] = {}
    for name in names:
        value = getattr(owner, name)
        if callable(value):
            found[name] = bare_name(value)
        elif dataclasses.is_dataclass(value):
            inner = plain_settings(value, [field.name for field in dataclasses.fields(value)])
            found |= {f"{name}.{key}": plain for key, plain in inner.items()}
        else:
            found[name] = plain_value(value)
    return {name: value for name, value in found.items() if name not in HARMLESS}


def warn_of_other_settings(checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Warn of settings of a module that are not those of the one that wrote a checkpoint.

    Args:
        settings: Those of the module, as plain values by their keys.
    """
    now = {f"model.{name}": value for name, value in settings.items() if name != "optimizer"}
    if changed := changed_settings(checkpoint.get("run_settings", {}), now):
        rank_zero_only(log.warning)(
            "the module has other settings than the one that wrote the checkpoint: %s. To have the "
            "same, pass them to load_from_checkpoint.",
            "; ".join(changed),
        )


class RunSettings:
    """The settings and the data of a run, and of the checkpoint that it resumes from."""

    def __init__(self) -> None:
        self.before: Mapping[str, Any] = {}
        """The checkpoint's settings; empty for new runs and for checkpoints of earlier releases."""
        self.now: dict[str, Any] = {}
        """Settings that the next checkpoint keeps."""
        self.changes: list[str] = []
        """Differences, such as ``model.group_size: 4 -> 8``."""
        self.last_start: Mapping[str, str] = {}
        """Section -> checksum of its settings when the run was last started or resumed."""
        self.checksums: dict[str, str] = {}
        """The same for this start."""
        self.allowed_before: set[str] = set()
        """The changes that were allowed at an earlier start."""

    def forget(self) -> None:
        """Forget the run that this one was resumed from."""
        self.before, self.last_start, self.allowed_before = {}, {}, set()

    def record_start(self, section: str, settings: Mapping[str, Any]) -> bool:
        """Record a section's settings at this start; return whether the last start had the same.

        If so, their differences from the checkpoint have been allowed already.
        """
        text = json.dumps(settings, sort_keys=True, default=repr)
        self.checksums[section] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.last_start.get(section) == self.checksums[section]

    def add(self, section: str, settings: Mapping[str, Any], *, may_change: bool) -> list[str]:
        """Take settings of this start, under ``section.name``, and return those that have changed.

        Raises:
            UserError: some differ from the checkpoint's, and may not.
        """
        found = {f"{section}.{name}": value for name, value in settings.items()}
        changed = changed_settings(self.before, found)
        if changed and not may_change:
            raise UserError(
                "the run was trained with other settings or data, and resuming with these would "
                f"make it a different run: {'; '.join(changed)}. Put those of the run back. Or "
                f"{ALLOW_CHANGES}, to change them from here on."
            )
        self.changes += [one for one in changed if one not in self.changes]
        self.now |= found
        return changed

    def add_validation(self, rows: str | None) -> bool:
        """Take a description of the validation rows; return whether they have changed, and warn.

        Args:
            rows: None without a validation.
        """
        before = self.before.get(VALIDATION)
        self.now[VALIDATION] = rows
        if None in (before, rows) or before == rows:
            return False
        rank_zero_only(log.warning)(
            "the validation rows are not those of the run so far (%s -> %s): accuracies from "
            "before cannot be compared with those from here on, and best.ckpt starts again.",
            *(before, rows),
        )
        return True

    def add_reward_code(self, code: Mapping[str, str | None], *, has_scored: bool) -> None:
        """Take checksums of the rewards' code by their names, and warn of those that have changed.

        It is not an error: a comment may have changed, or a bug been fixed for the resume.

        Args:
            has_scored: Whether the run has taken a step with the code before.
        """
        changed = self._changed_code(REWARD_CODE, code)
        if changed and has_scored:
            rank_zero_only(log.warning)(
                "the code of %s is not that of the run so far: rewards from before cannot be "
                "compared with those from here on, unless only comments have changed. To "
                "go on with the same rewards, stop, and put the earlier code back.",
                ", ".join(f"reward {name!r}" for name in changed),
            )

    def add_objective_code(self, code: Mapping[str, str | None], *, has_trained: bool) -> None:
        """Take checksums of the code of the user's functions by their keys, and warn likewise.

        Args:
            has_trained: Whether the run has taken a step with the code before.
        """
        changed = self._changed_code(OBJECTIVE_CODE, code)
        if changed and has_trained:
            rank_zero_only(log.warning)(
                "the code of %s is not that of the run so far: steps from here on have another "
                "objective than those before, unless only comments have changed. To go on with "
                "the same objective, stop, and put the earlier code back.",
                ", ".join(changed),
            )

    def _changed_code(self, key: str, code: Mapping[str, str | None]) -> list[str]:
        """Keep checksums for the next checkpoint; return whose are known and have changed."""
        before = self.before.get(key, {})
        self.now[key] = dict(code)
        return [name for name, new in code.items() if new and before.get(name) not in (None, new)]


def refuse_other_policy(module: nn.Module, saved: Mapping[str, Any], reloaded: Set[str]) -> None:
    """Check that a checkpoint has every parameter of a module, of the same shape.

    Args:
        saved: Name -> weight of the checkpoint.
        reloaded: Names of the parameters that are read from elsewhere.

    Raises:
        UserError: it lacks one, or has one of another shape.
    """
    parameters = dict(module.named_parameters())
    missing = sorted(parameters.keys() - saved.keys() - reloaded)
    if missing and all(name.startswith(REFERENCE) for name in missing):
        raise UserError(
            "model.objective.kl.coef must stay 0 when this run is resumed (it had no KL term, and "
            "its checkpoints have no reference). Set it to 0, or begin another run with the term, "
            "with model.policy.path set to the model that this one has trained."
        )
    if missing:
        raise UserError(
            f"the checkpoint lacks {len(missing)} trained parameters, such as {missing[0]!r}, "
            f"{OTHER_POLICY}"
        )
    for name, parameter in parameters.items():
        if (of_checkpoint := getattr(saved.get(name), "shape", None)) is not None:
            refuse_other_shape(name, of_checkpoint, whole_shape(parameter))
