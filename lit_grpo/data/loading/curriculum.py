"""The phases of a run: which share of a step each source has, and until when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.field_types import check_fields, check_value
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.spelling import did_you_mean

TEXT_SOURCES = ("verifiable", "open")
"""The sources that the short form of a curriculum has shares for, in this order."""
_KEY = "data.curriculum"


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run with weights of its own.

    Args:
        weights: Weight of each source; one that is left out rests.
        fraction: Length of the phase relative to the others.
        lr_scale: Factor of the learning rate in this phase.
    """

    weights: dict[str, float]
    fraction: float
    lr_scale: float = 1.0

    def check(self, key: str) -> None:
        """Raise UserError if a value is out of range, or of another type.

        A parser that tries several types would take an error of ``__init__`` for one of the type.
        """
        check_fields(key, self)
        check_range(f"{key}.fraction", self.fraction, above=0, is_finite=True)
        check_range(f"{key}.lr_scale", self.lr_scale, at_least=0, is_finite=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Phases and their boundaries.

    The last phase has no end, so a run whose steps are skipped stays in it.
    """

    phases: tuple[Phase, ...]
    boundaries: tuple[int, ...] = ()
    """The optimizer steps after which each phase but the last ends."""

    @classmethod
    def over(cls, phases: Sequence[Phase], num_steps: int, multiple: int) -> Curriculum:
        """Return the phases over a run with this number of optimizer steps.

        Args:
            multiple: Optimizer steps of a rollout step, in which a phase does not change.

        Raises:
            UserError: a phase is so short that it has no rollout step.
        """
        sums = list(accumulate(Fraction(str(phase.fraction)) for phase in phases))
        ends = [round(part / sums[-1] * num_steps / multiple) * multiple for part in sums[:-1]]
        for number, (start, end) in enumerate(pairwise([0, *ends, num_steps]), 1):
            if end <= start:
                raise UserError(
                    f"{_KEY}: every phase must have a step, got none in phase {number} of "
                    f"{len(phases)} (the run has {num_steps} optimizer steps, {multiple} in a "
                    "rollout step). Raise its fraction, or trainer.max_steps."
                )
        return cls(phases=tuple(phases), boundaries=tuple(ends))

    def index_at(self, optimizer_step: int) -> int:
        """Return the index of the phase after this number of optimizer steps."""
        return bisect_right(self.boundaries, optimizer_step)

    def lr_scale(self, optimizer_step: int) -> float:
        """Return the factor of the learning rate of the optimizer step after this number."""
        return self.phases[self.index_at(optimizer_step)].lr_scale


def parse_curriculum(
    value: str | Sequence[Phase] | None, weights: Mapping[str, float], key: str = _KEY
) -> tuple[Phase, ...]:
    """Return the phases of a setting; without one, a single phase with the sources' own weights.

    Args:
        value: Phases, or ``verifiable:open:fraction[:lr_scale]`` of each, separated by spaces.
        weights: The weight of each source.
        key: The setting, for messages.

    Raises:
        UserError: the text is not of that form, a source is unknown, or a value is out of range.
    """
    if value is None:
        return (Phase(weights=dict(weights), fraction=1.0),)
    if not isinstance(value, str | Sequence) or not value:
        raise setting_error(
            key, "text or a list of phases", repr(value), "YAML reads a:b:c as a number: quote it"
        )
    phases = _read_text(value, weights, key) if isinstance(value, str) else tuple(value)
    for number, phase in enumerate(phases):
        check_value(f"{key}.{number}", phase, Phase)
        phase.check(f"{key}.{number}")
        if unknown := [name for name in phase.weights if name not in weights]:
            rule, got = f"weights of {', '.join(weights)}", f"one of {', '.join(unknown)}"
            error = setting_error(key, rule, got)
            raise UserError(f"{error}{did_you_mean(unknown[0], weights)}")
    return phases


def _read_text(text: str, weights: Mapping[str, float], key: str) -> tuple[Phase, ...]:
    if set(weights) != set(TEXT_SOURCES):
        raise setting_error(
            key,
            f"a list of phases unless the sources are {' and '.join(TEXT_SOURCES)}",
            f"{text!r} for {', '.join(weights)}",
            "a phase in text is verifiable:open:fraction[:lr_scale]",
        )
    phases = []
    for word in text.split():
        try:
            verifiable, open_, fraction, *scale = map(float, word.split(":"))
            (lr_scale,) = scale or [1.0]
        except ValueError:
            rule = "phases of the form verifiable:open:fraction[:lr_scale]"
            example = "such as 0.8:0.2:0.4 0.2:0.8:0.6:0.5"
            raise setting_error(key, rule, repr(word), example) from None
        shares = dict(zip(TEXT_SOURCES, (verifiable, open_), strict=True))
        phases.append(Phase(weights=shares, fraction=fraction, lr_scale=lr_scale))
    return tuple(phases)


def quotas(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Divide a number over the sources by their weights: largest remainder, ties in their order.

    A source whose weight is 0 gets none.

    Raises:
        UserError: no weight is above 0, one is negative, or a source with a weight gets nothing.
    """
    for name, weight in weights.items():
        check_range(f"data: the weight of {name}", weight, at_least=0, is_finite=True)
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    if not (in_all := sum(exact.values())):
        raise UserError(
            f"data: at least one source must have a weight above 0, got {dict(weights)} (a step "
            "would have no prompt). Raise a weight."
        )
    shares = {name: weight * total / in_all for name, weight in exact.items()}
    numbers = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: numbers[name] - shares[name])
    for name in by_remainder[: total - sum(numbers.values())]:
        numbers[name] += 1
    for name, share in shares.items():
        if share and not numbers[name]:
            raise UserError(
                f"data: a source with a weight must have a prompt in every step, but {name!r} "
                f"with weight {weights[name]:g} of {float(in_all):g} has {float(share):.3g} of "
                f"prompts_per_step {total}. Raise data.prompts_per_step or the weight, or set the "
                "weight to 0."
            )
    return numbers
