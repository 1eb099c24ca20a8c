"""Training data of several sources, each with a weight, in phases."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

from lit_grpo.data.loading.adaptive import Adaptive, AdaptiveOrder
from lit_grpo.data.loading.curriculum import Curriculum, Phase, parse_curriculum, quotas
from lit_grpo.data.loading.loader import TrainingLoader
from lit_grpo.data.loading.order import RowOrder
from lit_grpo.data.loading.stream import PromptStream
from lit_grpo.data.module import PromptDataModule, Split, Unlisted, make_order
from lit_grpo.data.rows.prepared import Holdout
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import Prompt, UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.settings import check_type

log = logging.getLogger(__name__)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One source of a mixture.

    Args:
        data: Where its rows come from and how they become prompts.
        weight: Its share of a step relative to the other sources.
        adaptive: Sample its rows by how often the policy succeeds on them; null for all of them
            equally often.
    """

    data: PromptDataModule
    weight: float = 1.0
    adaptive: Adaptive | None = None


@checks_keywords
class MixtureData(PromptDataModule):
    """Prompts from several sources, in exact numbers in every step.

    Each source goes through its rows in its own order, by its ``seed`` and the mixture's,
    over and over; the other sources do not change it.

    Args:
        sources: Name -> source. Metrics and ``only_sources`` of rewards use the name.
        prompts_per_step: Prompts per rollout step, over all sources and processes.
        validation_batch_size: Prompts per validation batch, over all processes; null means
            ``prompts_per_step``.
        seed: Seed of the order and of the mixing.
        curriculum: Phases with weights of their own; for sources called ``verifiable`` and
            ``open`` also the text ``verifiable:open:fraction[:lr_scale]`` of each, separated by
            spaces. Null for the weights of the sources in the whole run.

    Raises:
        UserError: a setting is out of range, or a source with a weight would get no prompt.
    """

    def __init__(
        self,
        sources: dict[str, MixtureSource],
        *,
        prompts_per_step: int = 64,
        validation_batch_size: int | None = None,
        seed: int = 0,
        curriculum: str | list[Phase] | None = None,
    ) -> None:
        super().__init__(prompts_per_step, validation_batch_size, seed)
        check_range("data.prompts_per_step", prompts_per_step, at_least=1)
        _check_sources(sources)
        self.sources = sources
        weights = {name: source.weight for name, source in sources.items()}
        self.phases = parse_curriculum(curriculum, weights)
        for phase in self.phases:
            quotas(phase.weights, prompts_per_step)
        self._curriculum: Curriculum | None = None

    def rows(self, split: Split) -> Sequence[Row]:
        return [row for source in self.sources.values() for row in source.data.checked_rows(split)]

    def held_out(self) -> Holdout | None:
        """Return what any of the sources holds out."""
        found = [one for source in self.sources.values() if (one := source.data.held_out())]
        return reduce(or_, found) if found else None

    def lr_scale(self, optimizer_step: int) -> float:
        """Return the factor of the learning rate of an optimizer step, from 0."""
        return 1.0 if self._curriculum is None else self._curriculum.lr_scale(optimizer_step)

    def _load(self, split: Split) -> TrainingLoader | None:
        assert self.trainer is not None
        found = self._read_sources(split)
        if split != "train":
            read = (one for one in found.values() if not isinstance(one, Unlisted))
            prompts = [*chain.from_iterable(read)]
            return self._make_loader(split, prompts) if prompts else None
        if overfit := self.trainer.overfit_batches:  # type: ignore[attr-defined]
            why = "its steps are those of a run"
            raise setting_error("trainer.overfit_batches", "0 with MixtureData", overfit, why)
        orders = [self._order_of(name, prompts) for name, prompts in found.items()]
        num_batches = max(1, sum(map(len, found.values())) // self.prompts_per_step)
        self._curriculum = self._over_the_run(num_batches)
        if self.trainer.is_global_zero:
            self._report(self._curriculum)
        return self._mix(orders, self._curriculum, self._optimizer_step)

    def _order_of(self, name: str, prompts: list[Prompt] | Unlisted) -> RowOrder:
        source = self.sources[name]
        seed = (self.seed, source.data.seed)
        if source.adaptive is None:
            return make_order(name, prompts, seed)
        if isinstance(prompts, PromptStream):
            why = "the rows of a stream do not come again"
            raise setting_error(f"data.sources.{name}.adaptive", "null", "settings", why)
        return AdaptiveOrder(name, prompts, seed, source.adaptive)

    def _read_sources(self, split: Split) -> dict[str, list[Prompt] | Unlisted]:
        """Return the prompts of each source.

        Raises:
            UserError: a source has nothing to train on, or a row to train on is held out.
        """
        found: dict[str, list[Prompt] | Unlisted] = {}
        held_out = self.held_out() if split == "train" else None
        for name, source in self.sources.items():
            source.data.trainer = self.trainer
            prompts = source.data._read(split, name, held_out)
            if split == "train" and not prompts:
                raise UserError(
                    f"the source {name!r} must have training data, got none. Set "
                    f"data.sources.{name}.data."
                )
            if not isinstance(prompts, Unlisted):
                prompts = [replace(one, source=name, row=row) for row, one in enumerate(prompts)]
            found[name] = prompts
        return found

    def _over_the_run(self, num_batches: int) -> Curriculum:
        """Return the phases with their boundaries in optimizer steps."""
        if len(self.phases) == 1:
            return Curriculum(phases=self.phases)
        trainer = self.trainer
        assert trainer is not None
        module: Any = trainer.lightning_module
        num_steps = trainer.max_steps
        if num_steps <= 0:
            if not trainer.max_epochs or trainer.max_epochs < 0:
                raise UserError(
                    "data.curriculum needs the length of the run, which has no end. Set "
                    "trainer.max_steps or trainer.max_epochs."
                )
            num_steps = trainer.max_epochs * module.optimizer_steps_per_epoch(num_batches)
        return Curriculum.over(self.phases, num_steps, module.optimizer_steps_per_epoch(1))

    def _optimizer_step(self, num_ahead: int) -> int:
        """Return the optimizer steps before the batch this many after the current one."""
        assert self.trainer is not None
        if not num_ahead:
            return self.trainer.global_step
        module: Any = self.trainer.lightning_module
        return self.trainer.global_step + num_ahead * int(module.optimizer_steps_per_epoch(1))

    def _report(self, curriculum: Curriculum) -> None:
        """Log the numbers of a step, by phase, since shares are rounded to whole prompts."""
        starts = (0, *curriculum.boundaries)
        for number, (start, phase) in enumerate(zip(starts, self.phases, strict=True), 1):
            numbers = quotas(phase.weights, self.prompts_per_step)
            shares = ", ".join(f"{count} of {name}" for name, count in numbers.items())
            name = f"phase {number} from optimizer step {start}: " if len(self.phases) > 1 else ""
            scale = "" if phase.lr_scale == 1 else f"; learning rate times {phase.lr_scale:g}"
            log.info("%severy step has %s%s", name, shares, scale)


def _check_sources(sources: dict[str, MixtureSource]) -> None:
    check_type("data.sources", sources, dict)
    if not sources:
        raise setting_error("data.sources", "one source or more", "none")
    for name, source in sources.items():
        key = f"data.sources.{name}"
        if not re.fullmatch(r"\w+", name):
            rule = "names of letters, digits and '_'"
            raise setting_error("data.sources", rule, repr(name), "they name metrics")
        if isinstance(source, PromptDataModule):
            got, fix = type(source).__name__, "write MixtureSource(data=...)"
            raise setting_error(key, "of type MixtureSource", got, fix)
        check_type(key, source, MixtureSource)
        check_fields(key, source)
        if isinstance(source.data, MixtureData):
            raise setting_error(f"{key}.data", "data of one source", "MixtureData")
        _check_unset(source.data, key)


def _check_unset(data: PromptDataModule, key: str) -> None:
    """Check that a source does not set what the mixture decides."""
    kinds = [inspect.signature(kind.__init__).parameters for kind in type(data).__mro__]  # type: ignore[misc]
    named = (one["prompts_per_step"].default for one in kinds if "prompts_per_step" in one)
    if data.prompts_per_step != next(named):
        setting, got = "prompts_per_step", data.prompts_per_step
    elif data.validation_batch_size != data.prompts_per_step:
        setting, got = "validation_batch_size", data.validation_batch_size
    else:
        return
    raise UserError(
        f"a source of a mixture must not set {setting}, got {got} in {key} (the mixture decides "
        f"it). Set data.{setting}."
    )
