"""Data modules: turn rows from files or datasets into loaders of prompts.

Constructing a data module reads nothing; ``setup`` reads the rows and tokenizes them with the
tokenizer of the policy.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data.loading.curriculum import Curriculum, Phase
from lit_grpo.data.loading.leaked import describe_leaked
from lit_grpo.data.loading.loader import PromptLoader, TrainingLoader, check_sizes
from lit_grpo.data.loading.mixture_loader import MixtureLoader
from lit_grpo.data.loading.order import RowOrder, TableOrder
from lit_grpo.data.loading.stream import PromptStream, StreamOrder
from lit_grpo.data.prompts.chat import describe_answered
from lit_grpo.data.prompts.lazy_prompts import LazyPrompts
from lit_grpo.data.prompts.prompt_format import (
    PromptFormat,
    build_prompts,
    in_prompt_format,
    in_source,
)
from lit_grpo.data.prompts.repeated import describe_repeated
from lit_grpo.data.rows.given_rows import as_rows
from lit_grpo.data.rows.mapped import MappedRows
from lit_grpo.data.rows.prepared import Holdout, holdout_keys, prompts_hash
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError, check_range
from lit_grpo.types.field_types import check_value
from lit_grpo.types.functions import unfit_signature
from lit_grpo.types.overrides import check_made, check_overrides
from lit_grpo.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Split = Literal["train", "validation", "test"]
Unlisted = LazyPrompts | PromptStream
"""Prompts that are not built before a step needs them."""

_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
}


class PromptDataModule(LightningDataModule, ABC):
    """Base of all data modules; a subclass provides the rows of each split.

    Its attribute ``prompt_format`` says how they become prompts.

    The position in the training data is saved here as well as in the loader, because a trainer
    that resumes from the very end of an epoch does not load the loader's state.
    """

    prompt_format = PromptFormat()

    def __init__(
        self,
        prompts_per_step: int = 64,
        validation_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_overrides(type(self), {"setup": ", or make the rows in rows(split)"})
        check_range("data.seed", seed, at_least=0)
        check_value("data.prompts_per_step", prompts_per_step, int)
        check_value("data.validation_batch_size", validation_batch_size, int | None)
        self.prompts_per_step = prompts_per_step
        self.validation_batch_size = (
            prompts_per_step if validation_batch_size is None else validation_batch_size
        )
        self.seed = seed
        self._loaders: dict[Split, TrainingLoader] = {}
        self.validation_hash = ""
        """Equal for runs that are validated on the same prompts and gold answers."""
        self.leaked = ""
        """A sentence if prompts are both evaluated on and trained on."""

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Row | Mapping[str, Any]]:
        """Return the rows of a split, the same on every rank; none if there is no such split.

        A row is a dict with its columns, or a `Row` that has an id and a source of its own. A run
        that gets `MappedRows` tokenizes each when a step needs it.
        """

    def checked_rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split, with each dict as a `Row`.

        Raises:
            UserError: `rows` has returned something else.
        """
        if (signature := unfit_signature(self.rows, ["split"])) is not None:
            raise UserError(
                f"{type(self).__name__}.rows must take the split, got rows{signature}. Write "
                "def rows(self, split)."
            )
        given = self.rows(split)
        if isinstance(given, MappedRows):
            return given
        return as_rows(type(self).__name__, split, given)

    def may_have(self, split: Split) -> bool:
        """Return whether there may be rows of a split, before they are read."""
        return True

    def is_held_out_of_train(self, split: Split) -> bool:
        """Return whether a split is taken out of the training rows, so that it shares none."""
        return True

    def check_processes(self, num_processes: int) -> None:
        """Check that so many processes can share the prompts of a rollout step.

        Raises:
            UserError: their number does not divide it.
        """
        check_sizes(self.prompts_per_step, num_processes, None, training=True)

    def held_out(self) -> Holdout | None:
        """Return what must not be trained on; None if nothing is known to be held out."""
        return None

    def setup(self, stage: str) -> None:
        check_made(self)
        for split in _SPLITS.get(stage, ()):
            if loader := self._load(split):
                self._loaders[split] = loader
                if split == "validation":
                    self.validation_hash = prompts_hash(loader.some_prompts())
            elif stage != "fit" or split == "train":
                fix = "" if split == "train" else " to rows that the policy was not trained on"
                setting = f"what {type(self).__name__}.rows({split!r}) returns"
                if split in inspect.signature(type(self)).parameters:
                    setting = f"data.{split}"
                raise UserError(
                    f"{split} data with at least one row is needed, got none. Set {setting}{fix}."
                )
        if stage == "fit" and "validation" in self._loaders:
            held_out = self._loaders["validation"].some_prompts()
            self.leaked = describe_leaked(self._loaders["train"], held_out)
        elif stage in ("validate", "test"):
            self._warn_of_leaked(*_SPLITS[stage])

    def _warn_of_leaked(self, split: Split) -> None:
        """Warn of prompts of an evaluation that the same data also train on."""
        if self.is_held_out_of_train(split) or not self.may_have("train"):
            return
        try:
            train = self._make_loader(split, self._read("train"))
        except UserError as error:
            rank_zero_only(log.info)("not compared with the training data: %s", error)
            return
        self.leaked = describe_leaked(train, self._loaders[split].some_prompts())
        if self.leaked:
            rank_zero_only(log.warning)(self.leaked)

    def find(self, split: Split, ids: Collection[str]) -> dict[str, Prompt]:
        """Return the prompts of a split with these ids, whether or not they fill a step."""
        found: dict[str, Prompt] = {}
        for name, prompts in self._read_sources(split).items():
            found |= make_order(name, prompts, ()).find(ids)
        return found

    def train_dataloader(self) -> TrainingLoader:
        return self._loaders["train"]

    def val_dataloader(self) -> TrainingLoader | list[Any]:
        # Lightning skips validation when it gets an empty list.
        return self._loaders.get("validation", [])

    def test_dataloader(self) -> TrainingLoader:
        return self._loaders["test"]

    def state_dict(self) -> dict[str, Any]:
        return {"train": self._loaders["train"].state_dict()} if "train" in self._loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "train" in self._loaders:
            self._loaders["train"].load_state_dict(state_dict["train"])

    def _load(self, split: Split) -> TrainingLoader | None:
        """Return a loader of a split, or None if there is no such split."""
        prompts = self._read(split)
        return self._make_loader(split, prompts) if prompts else None

    def _read_sources(self, split: Split) -> dict[str, list[Prompt] | Unlisted]:
        """Return the prompts of each source, which has no name without a mixture."""
        return {"": self._read(split)}

    def _read(
        self, split: Split, source: str = "", held_out: Holdout | None = None
    ) -> list[Prompt] | Unlisted:
        """Read and tokenize a split; mapped rows are tokenized when a step needs them.

        Args:
            source: Name of the source, in a mixture.
            held_out: What the other sources of the mixture hold out.

        Raises:
            UserError: a row to train on is held out.
        """
        assert self.trainer is not None, "the trainer calls setup"
        what = f"{split} data of {source}" if source else f"{split} data"
        if self.trainer.is_global_zero and self.may_have(split):
            log.info("reading and tokenizing the %s", what)
        rows = self.checked_rows(split)
        if not rows:
            return []
        if split == "train" and (held_out := held_out or self.held_out()):
            held_out.refuse(_holdout_keys(rows), f"the {what}")
        tokenizer = cast(Tokenizer, self.trainer.lightning_module.tokenizer)
        if isinstance(rows, MappedRows):
            if self.trainer.is_global_zero:
                log.info("%s: %d rows, each tokenized when a step needs it", what, len(rows))
            return LazyPrompts(rows, tokenizer, self.prompt_format, source)
        try:
            prompts = build_prompts(rows, tokenizer, self.prompt_format, what)
        except UserError as error:
            raise UserError(self._reworded(str(error), source)) from error
        if self.trainer.is_global_zero:
            limit = self.prompt_format.max_prompt_tokens
            _report(what, len(rows), len(prompts), limit)
            for sentence in filter(None, (*describe_repeated(prompts), describe_answered(prompts))):
                log.warning("%s: %s", what, sentence)
        return prompts

    def _reworded(self, message: str, source: str) -> str:
        """Name the settings of an error as the user gives them."""
        if source:
            return in_source(message, source)
        if "prompt_format" in vars(self):  # made of the arguments that the message names
            return message
        return in_prompt_format(message, type(self).__name__)

    def _make_loader(self, split: Split, prompts: Sequence[Prompt] | Unlisted) -> TrainingLoader:
        assert self.trainer is not None
        if isinstance(prompts, Unlisted):
            whole = Curriculum(phases=(Phase(weights={"": 1.0}, fraction=1.0),))
            return self._mix([make_order("", prompts, (self.seed,))], whole)
        is_train = split == "train"
        return PromptLoader(
            prompts,
            self.prompts_per_step if is_train else self.validation_batch_size,
            seed=self.seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            training=is_train,
            # overfit_batches repeats the same few batches in every epoch.
            shuffle=not self.trainer.overfit_batches,  # type: ignore[attr-defined]
            epoch_limit=self.trainer.limit_train_batches,
        )

    def _mix(
        self,
        orders: Sequence[RowOrder],
        curriculum: Curriculum,
        clock: Callable[[int], int] = lambda ahead: ahead,
    ) -> MixtureLoader:
        assert self.trainer is not None
        return MixtureLoader(
            orders,
            self.prompts_per_step,
            curriculum,
            clock,
            seed=self.seed,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            epoch_limit=self.trainer.limit_train_batches,
        )


def _holdout_keys(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Return the keys of each row by which held-out rows are recognised."""
    if isinstance(rows, MappedRows):
        return (holdout_keys(one["id"], one) for one in rows.columns("id", "text_hash", "question"))
    return (holdout_keys(row.id, row.columns) for row in rows)


def make_order(name: str, prompts: Sequence[Prompt] | Unlisted, seed: Sequence[int]) -> RowOrder:
    """Return the order of the prompts of a source."""
    if isinstance(prompts, PromptStream):
        return StreamOrder(name, prompts, seed)
    return TableOrder(name, prompts, seed)


def _report(what: str, num_rows: int, num_prompts: int, limit: int | None) -> None:
    dropped = num_rows - num_prompts
    if dropped:
        log.warning(
            "%s: %d rows, %d of them dropped (longer than max_prompt_tokens=%s)",
            *(what, num_rows, dropped, limit),
        )
    else:
        log.info("%s: %d rows", what, num_rows)
