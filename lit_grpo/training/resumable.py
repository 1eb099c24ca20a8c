"""State of a module that a checkpoint keeps, and whether a resumed run is still the same one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod

from lit_grpo.distributed.optimizer_class import SETTING, optimizer_class
from lit_grpo.policy.files.model_source import (
    POLICY_PATH,
    ModelSource,
    as_plain,
    refuse_changed,
    refuse_other_settings,
    refuse_other_start,
    save_sources,
)
from lit_grpo.training.base import PolicyModule
from lit_grpo.training.checks.resume_changes import (
    CARRIED,
    plain_settings,
    refuse_other_policy,
    warn_of_other_settings,
)
from lit_grpo.training.optimizer.resumed_state import (
    changed_optimizer_settings,
    leave_out_other_optimizer,
    refuse_missing_state,
)
from lit_grpo.training.optimizer.settings import by_key, configured_settings
from lit_grpo.types import UserError
from lit_grpo.types.plain import is_plain
from lit_grpo.types.saved_state import ALLOW_CHANGES

log = logging.getLogger(__name__)

CHANGEABLE = ("engine", "lr_schedule", "warmup_steps")
"""Attributes of a module that may change during a run."""
CHANGEABLE_OF_POLICY = ("attn_implementation", "gradient_checkpointing", "merge_lora", "packing")
"""Attributes of a policy that may change during a run."""
CHANGEABLE_OF_EVALUATION = ("before_training", "num_samples", "pass_at")
"""Attributes of an evaluation that may change during a run."""


class ResumableModule(PolicyModule):
    """Compare a resumed run with the one that wrote its checkpoint."""

    has_other_validation = False
    """Whether a resumed run is validated on other rows than before."""
    trained_in: Path | None = None
    """The directory of the run that has trained this module."""
    changes: Sequence[str] = ()
    """Settings that a resumed run changes, ``model.group_size: 4 -> 8``; the command line lists
    the changes of its config."""
    _last_start_step = 0
    """The rollout step from which the run was last started or resumed."""
    _is_foreign: Callable[[str], bool] | None = None
    """Returns whether a checkpoint is of another run, if this one keeps events."""
    _has_other_optimizer = False
    """Whether the state of the optimizer in the checkpoint is of no use to the current one."""
    allow_changes = False
    """Whether a resumed run may have other settings or data than the one before."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: Sequence[str] | str | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Save the arguments of a subclass, as in Lightning.

        Settings of the module itself that are objects, such as ``sampling``, are left out unless
        they are named: no checkpoint can hold them.
        """
        left_out = [ignore] if isinstance(ignore, str) else [*(ignore or ())]
        ours = () if args else self._settings - self.hparams.keys()
        objects = [one for one in ours if not is_plain(getattr(self, one, self))]
        super().save_hyperparameters(
            *args,
            ignore=[*left_out, *objects],
            frame=frame or sys._getframe(1),
            logger=logger,
        )

    @_restricted_classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Build a module and load a checkpoint's weights, as in Lightning.

        A warning names settings that are not those of the module that wrote the checkpoint.

        Args:
            checkpoint_path: Path of a checkpoint.
            *args: As in Lightning.
            **kwargs: As in Lightning, and the arguments of the constructor that are no
                hyperparameters of the checkpoint.

        Raises:
            UserError: arguments of the constructor are missing, or the weights are of another
                policy.
        """
        try:  # on_load_checkpoint refuses weights of another policy, also without `strict`
            return super().load_from_checkpoint(
                checkpoint_path, *args, **{"strict": False, **kwargs}
            )
        except TypeError as error:
            if "__init__() missing" not in str(error):
                raise
            raise UserError(
                f"{cls.__name__}.load_from_checkpoint must get the arguments of the constructor, "
                "such as policy= (a checkpoint has weights, and not what the module is made of). "
                "Pass them; or load the trained model from RUN/final, as Policy('RUN/final') or by "
                "transformers; lit_grpo.export_checkpoint writes that of another step."
            ) from error

    def settings(self) -> dict[str, Any]:
        """Return what decides what is learned, as plain values by their keys."""
        weight_settings = {
            key.removeprefix("model."): value
            for key, value in self.policy.weight_settings().items()
        }
        return (
            plain_settings(self, ("seed",))
            | _within("policy", plain_settings(self.policy, ("dtype", "reasoning_tags")))
            | weight_settings
            | {SETTING.removeprefix("model."): self._optimizer_class}
        )

    def changeable_settings(self) -> dict[str, Any]:
        """Return how the run is executed and evaluated, and how fast it learns."""
        of_policy = plain_settings(self.policy, CHANGEABLE_OF_POLICY)
        of_policy["compile"] = self.policy.compile_forward
        of_evaluation = plain_settings(self.evaluation, CHANGEABLE_OF_EVALUATION)
        of_evaluation["accuracy"] = [one.name for one in self.evaluation.suite.rewards]
        return (
            plain_settings(self, CHANGEABLE)
            | _within("policy", of_policy)
            | _within("evaluation", of_evaluation)
        )

    def _log_changes(self) -> None:
        """Log what a resumed run changes, as far as no config has shown it."""
        settings = self._run_settings
        if self.trainer.ckpt_path is not None:
            earlier, now = self._earlier_optimizer_settings, self._optimizer_settings
            settings.changes += changed_optimizer_settings(
                earlier, now, is_other_class=self._has_other_optimizer
            )
        new, settings.changes = settings.changes, []
        if self.changes:
            shown = {one.partition(":")[0].replace(".init_args", ""): one for one in self.changes}
            since = {one.partition(":")[0]: one for one in new}  # the checkpoint, not the config
            self.changes = [since.get(key, one) for key, one in shown.items()]
            new = [
                one
                for one in new
                if (one.startswith("data.") or one in settings.allowed_before or CARRIED in one)
                and one.partition(":")[0] not in shown
            ]
        for change in new:
            rank_zero_only(log.info)("changed for this part of the run: %s", change)
        self.changes = [*self.changes, *new]

    def _compare(self, section: str, settings: Mapping[str, Any]) -> None:
        as_before = self._run_settings.record_start(section, settings)
        changed = self._run_settings.add(
            section, settings, may_change=as_before or self.allow_changes
        )
        if as_before:
            self._run_settings.allowed_before |= {*changed}

    @property
    def settings_of_start(self) -> dict[str, str]:
        """Checksums of what decides what is learned, by section, for the events of the run."""
        return self._run_settings.checksums

    def take_last_start(
        self, checksums: Mapping[str, str], step: int, is_foreign: Callable[[str], bool]
    ) -> None:
        """Record the settings of the run's last start or resume: a resume with these needs no
        ``allow_changes``.

        Args:
            step: The rollout step that it was resumed from. Later checkpoints either have the same
                settings, or are of steps that the run has left behind.
            is_foreign: Return whether the checkpoint at a path is another run's, of which the
                last start says nothing.
        """
        self._run_settings.last_start, self._last_start_step = checksums, step
        self._is_foreign = is_foreign

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_settings"] = self._optimizer_settings
        checkpoint["run_settings"] = self._run_settings.now
        save_sources(checkpoint, self._sources())
        weights, reloaded = checkpoint["state_dict"], self._reloaded_names()
        checkpoint["state_dict"] = {k: v for k, v in weights.items() if k not in reloaded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        is_fit = self._trainer is not None and self.trainer.state.fn == "fit"
        may_be_others = self.allow_changes
        if is_fit:  # another checkpoint may be evaluated afterwards
            is_later = checkpoint.get("summary", {}).get("rollout_step", 0) > self._last_start_step
            path = str(self.trainer.ckpt_path or "")
            if is_later or (self._is_foreign is not None and self._is_foreign(path)):
                self._run_settings.last_start = {}  # of a start from another checkpoint
            sources = as_plain(self._sources())
            may_be_others |= self._run_settings.record_start("sources", sources)
            if not may_be_others:
                refuse_other_start(checkpoint, self.policy.path)
            self._take_trained_weights(checkpoint)
        refuse_other_policy(self, checkpoint["state_dict"], self._reloaded_names())
        if self._trainer is None:  # by load_from_checkpoint
            warn_of_other_settings(checkpoint, self.settings())
        if is_fit or self.policy.lora is not None:
            refuse_changed(checkpoint, self._sources(), may_be_others=may_be_others)
        self.strict_loading = not self._reloaded_names()
        self._earlier_optimizer_settings = checkpoint["optimizer_settings"]
        if is_fit:
            self._run_settings.before = checkpoint.get("run_settings", {})
            optimizer = self._present_optimizer()
            self._optimizer_class = optimizer_class(optimizer)
            self._compare("model", self.settings())
            self._check_optimizer_state(checkpoint, optimizer)
            self._has_other_optimizer = leave_out_other_optimizer(
                checkpoint,
                optimizer,
                loads_itself=self.trainer.strategy.restore_checkpoint_after_setup,
            )
        else:
            refuse_other_settings(checkpoint, self.policy.weight_settings())

    def _take_trained_weights(self, checkpoint: dict[str, Any]) -> None:
        """Let a run that no longer averages its weights go on from those that it trains.

        Lightning would take the average.

        Raises:
            UserError: such a change is not allowed.
        """
        trained = checkpoint.get("current_model_state")
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if trained is None or any(isinstance(one, WeightAveraging) for one in callbacks):
            return
        if not self.allow_changes:
            raise UserError(
                "the run averages its weights, and no callback does so now (its checkpoint has "
                "the weights that are trained and their average). Add the callback again, such as "
                f"EMAWeightAveraging. Or {ALLOW_CHANGES}, to train on without an average."
            )
        checkpoint["state_dict"] = trained

    def _present_optimizer(self) -> Any:
        """Return the optimizer, or one like it if it is made after the checkpoint is loaded."""
        if self.trainer.strategy.restore_checkpoint_after_setup:
            return self.trainer.optimizers[0]
        return self.build_optimizer(self.policy.trainable_parameters())

    def _check_optimizer_state(self, checkpoint: Mapping[str, Any], optimizer: Any) -> None:
        """Refuse settings that need a state which the checkpoint lacks, unless they are allowed.

        They have been allowed if the run was last resumed with them.
        """
        now = by_key(configured_settings(optimizer))
        if not self._run_settings.record_start("optimizer", now) and not self.allow_changes:
            refuse_missing_state(checkpoint, optimizer, self._earlier_optimizer_settings)

    def _sources(self) -> dict[str, ModelSource]:
        """Return, by its key, each model that was read from a path."""
        if (source := self.policy.loaded_from) is None:
            return {}
        is_read_again = bool(self._reloaded_names())
        return {POLICY_PATH: replace(source, is_read_again=is_read_again)}

    def _reloaded_names(self) -> set[str]:
        """Return the parameters that a resumed run reads from ``policy.path`` again.

        They are the frozen base of an adapter, or a reference that never moves.
        """
        if self.policy.path is None or (self.policy.lora is None and self.refreshes_reference):
            return set()
        # The state dict contains tied weights under each of their names.
        named = self.named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if not parameter.requires_grad}


def _within(section: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in settings.items()}
