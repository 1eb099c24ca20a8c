"""What a checkpoint keeps of a module, and whether a resumed run is still the same one."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.policy.files.model_source import (
    ModelSource,
    refuse_changed,
    refuse_other_settings,
    save_sources,
)
from lit_grpo.training.base import PolicyModule
from lit_grpo.training.checks.same_run import (
    changed_settings,
    plain_settings,
    refuse_other_policy,
)
from lit_grpo.training.optimizer.settings import by_key

log = logging.getLogger(__name__)


class ResumableModule(PolicyModule):
    """Compare a resumed run with the one that wrote its checkpoint."""

    has_other_validation = False
    """Whether a resumed run is validated on other rows than before."""
    trained_in: Path | None = None
    """The directory of the run that has trained this module."""
    changes: Sequence[str] = ()
    """What a resumed run does otherwise than before, ``model.group_size: 4 -> 8``; the command
    line has those of its config."""
    allow_changes = False
    """Whether a resumed run may have other settings or data than the one before."""

    def settings(self) -> dict[str, Any]:
        """Return what decides what is learned, as plain values by their keys."""
        computed_by = {
            key.removeprefix("model."): value for key, value in self.policy.computed_by().items()
        }
        dtype = {"policy.dtype": self.policy.dtype}
        return plain_settings(self, ("seed",)) | dtype | computed_by

    def _tell_changes(self) -> None:
        """Log what a resumed run does otherwise than before, as far as no config has shown it."""
        settings = self._run_settings
        if self.trainer.ckpt_path is not None:
            earlier, now = self._earlier_optimizer_settings, self._optimizer_settings
            settings.changes += changed_settings(by_key(earlier), by_key(now))
        new, settings.changes = settings.changes, []
        if self.changes:
            shown = {one.partition(":")[0].replace(".init_args", "") for one in self.changes}
            new = [
                one for one in new if one.startswith("data.") and one.partition(":")[0] not in shown
            ]
        for change in new:
            rank_zero_only(log.info)("changed for this part of the run: %s", change)
        self.changes = [*self.changes, *new]

    def _compare(self, section: str, settings: Mapping[str, Any]) -> None:
        self._run_settings.add(section, settings, may_change=self.allow_changes)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_settings"] = self._optimizer_settings
        checkpoint["run_settings"] = self._run_settings.now
        save_sources(checkpoint, self._sources())
        weights, reloaded = checkpoint["state_dict"], self._reloaded_names()
        checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in reloaded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_fit = self._trainer is not None and self.trainer.state.fn == "fit"
        refuse_other_policy(self, checkpoint["state_dict"], self._reloaded_names())
        if is_fit or self.policy.lora is not None:
            refuse_changed(checkpoint, self._sources(), may_be_others=self.allow_changes)
        self.strict_loading = not self._reloaded_names()
        self._earlier_optimizer_settings = checkpoint["optimizer_settings"]
        if is_fit:
            self._run_settings.before = checkpoint.get("run_settings", {})
            self._compare("model", self.settings())
        else:
            refuse_other_settings(checkpoint, self.policy.computed_by())

    def _sources(self) -> dict[str, ModelSource]:
        """Return, by its key, each model that was read from a path."""
        if (source := self.policy.loaded_from) is None:
            return {}
        is_read_again = bool(self._reloaded_names())
        return {"model.policy.path": replace(source, is_read_again=is_read_again)}

    def _reloaded_names(self) -> set[str]:
        """Return the parameters that a resumed run reads from ``policy.path`` again.

        They are the frozen base of an adapter, or a reference that never moves.
        """
        if self.policy.path is None or (self.policy.lora is None and self.refreshes_reference):
            return set()
        # The state dict contains tied weights under each of their names.
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}
