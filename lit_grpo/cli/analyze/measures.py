"""Measure rows with scores: their signal, the agreement of votes, and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lit_grpo.cli.analyze.scored_rows import ScoredRow, ScoredRows
from lit_grpo.rewards.judged.base import agreement

NUM_BINS = 20
ROUNDING = 1e-9
"""Tolerance when comparing the difference of two scores with a threshold: 0.3 - 0.2 is less than
0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Percentiles of lengths."""

    p5: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Lengths | None:
        """Return the percentiles of the values, or None without values."""
        if not values:
            return None
        found = np.percentile(values, [5, 50, 95, 100]).tolist()
        p5, p50, p95, highest = (round(one, 1) for one in found)
        return cls(p5=p5, p50=p50, p95=p95, max=highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRates:
    """The pass rates of a policy on some rows."""

    num_rows: int
    """Rows whose rate is known."""
    mean: float
    num_never: int
    """Rows on which it is never right."""
    num_always: int
    histogram: tuple[int, ...]
    """[20] rows by their rate, from 0 to 1."""

    @classmethod
    def of(cls, rates: Sequence[float]) -> PassRates | None:
        """Return the summary of the rates, or None without rates."""
        if not rates:
            return None
        return cls(
            num_rows=len(rates),
            mean=round(sum(rates) / len(rates), 4),
            num_never=sum(rate == 0 for rate in rates),
            num_always=sum(rate == 1 for rate in rates),
            histogram=_histogram(rates, 1.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The measurements of some rows."""

    num_rows: int
    share: float
    """Share of these rows in all rows."""
    num_compared: int
    """Rows whose answers are compared by scores."""
    num_null: int
    """Compared rows without scores."""
    signal_useful_pct: float | None
    """Percentage of the compared rows, those without scores included, whose best and worst score
    differ by the threshold or more; None without compared rows."""
    spread_histogram: tuple[int, ...]
    """[20] rows by the best score minus the worst, from 0 to `spread_max`."""
    spread_max: float
    vote_agreement: float | None
    """Mean share of the most common grade among the votes on an answer."""
    vote_deviation: float | None
    """Mean deviation of the votes on an answer, on the scale from 0 to 1."""
    prompt_lengths: Lengths | None
    answer_lengths: Lengths | None
    num_duplicates: int | None
    """Rows whose prompt another row has already; None if the prompts are not known."""
    nulls: Mapping[str, int]
    """Number of rows with a null, by column; a column that is null throughout a source is left out
    there."""
    pass_rates: PassRates | None
    """Pass rates of a policy, if any are known."""
    num_sampled: int
    """Rows for which it is known whether the scores of a policy's completions differ."""
    num_without_gradient: int
    """Rows among these whose completions all have the same score."""


def measure(found: ScoredRows, threshold: float) -> dict[str, Measures]:
    """Return the measures of all rows, under ``all``, and of each source if there are several.

    Args:
        found: The rows.
        threshold: The least difference of two scores by which answers can be ranked; 0 takes any.
    """
    by_source: dict[str, list[ScoredRow]] = {}
    for row in found.rows:
        by_source.setdefault(row.source, []).append(row)
    number = len(found.rows)
    measured = {"all": _measure(found.rows, threshold, number, _nulls(by_source.values()))}
    if len(by_source) > 1:
        for name, rows in sorted(by_source.items()):
            measured[name] = _measure(rows, threshold, number, _nulls([rows]))
    return measured


def as_dict(measured: Mapping[str, Measures]) -> dict[str, Any]:
    """Return measures as JSON has them."""
    return {name: asdict(one) for name, one in measured.items()}


def _measure(
    rows: Sequence[ScoredRow], threshold: float, num_all: int, nulls: Mapping[str, int]
) -> Measures:
    compared = [row for row in rows if row.is_compared]
    spreads = [row.spread for row in compared if row.spread is not None]
    useful = sum(spread > 0 and spread >= threshold - ROUNDING for spread in spreads)
    top = max(1.0, *spreads) if spreads else 1.0
    votes = [agreement(one) for row in rows for one in row.votes if len(one) > 1]
    return Measures(
        num_rows=len(rows),
        share=round(len(rows) / num_all, 4) if num_all else 0.0,
        num_compared=len(compared),
        num_null=len(compared) - len(spreads),
        signal_useful_pct=round(100 * useful / len(compared), 2) if compared else None,
        spread_histogram=_histogram(spreads, top),
        spread_max=round(top, 4),
        vote_agreement=_mean(votes),
        vote_deviation=_mean([one for row in rows for one in row.deviations]),
        prompt_lengths=Lengths.of([n for row in rows if (n := row.prompt_length) is not None]),
        answer_lengths=Lengths.of([length for row in rows for length in row.answer_lengths]),
        num_duplicates=_num_duplicates(rows),
        nulls=nulls,
        pass_rates=PassRates.of([rate for row in rows if (rate := row.pass_rate) is not None]),
        num_sampled=sum(row.has_gradient is not None for row in rows),
        num_without_gradient=sum(row.has_gradient is False for row in rows),
    )


def _histogram(values: Sequence[float], top: float) -> tuple[int, ...]:
    """Return the numbers of values in each bin from 0 to `top`."""
    bins = Counter(min(NUM_BINS - 1, int(NUM_BINS * one / top + ROUNDING)) for one in values)
    return tuple(bins[number] for number in range(NUM_BINS))


def _nulls(sources: Iterable[Sequence[ScoredRow]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for rows in sources:
        counts = Counter(name for row in rows for name in row.nulls)
        found += Counter({name: num for name, num in counts.items() if num < len(rows)})
    return dict(sorted(found.items()))


def _num_duplicates(rows: Sequence[ScoredRow]) -> int | None:
    known = [row.text_hash for row in rows if row.text_hash]
    return len(known) - len(set(known)) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
