"""Read rows with scores: prepared data, a cache of gold scores, a run, a file of completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from lit_grpo.cli.prepare.fingerprint import PREFIX, read_scale
from lit_grpo.cli.prepare.gold_cache import PROGRAM, CheckedAnswers, JudgeVotes
from lit_grpo.cli.prepare.join_gold import QUESTION_DIGITS
from lit_grpo.data.rows.prepared import PreparedDir, find_prepared
from lit_grpo.objective.advantages import RELATIVE_TOLERANCE
from lit_grpo.runs.files.completions import files_by_step, read_completions, split_groups
from lit_grpo.types import UserError
from lit_grpo.types.settings import list_some

PASS_RATE = "pass_rate"
"""The column of prepared data with the share of a policy's completions that are right."""
HAS_GRADIENT = "has_gradient"
"""The column of prepared data that says whether the scores of a policy's completions differ."""
Measure = Callable[[str], float]
"""The length of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A prompt with several answers, or completions, and their scores."""

    source: str
    scores: tuple[float, ...] | None
    """None if they are missing."""
    is_compared: bool = True
    """Whether its answers are compared by scores at all: a program's row may have none."""
    votes: tuple[tuple[int, ...], ...] = ()
    """The grades of the votes on each answer, if they are known one by one."""
    deviations: tuple[float, ...] = ()
    """The deviation of the votes on each answer, if it is known."""
    prompt_length: float | None = None
    answer_lengths: tuple[float, ...] = ()
    text_hash: str = ""
    """Equal for equal prompts; empty where they are repeated on purpose, or are not known."""
    nulls: tuple[str, ...] = ()
    """The columns that are null."""
    pass_rate: float | None = None
    """The share of a policy's completions that are right, if it is known."""
    has_gradient: bool | None = None
    """Whether the scores of a policy's completions differ, if it is known."""

    @property
    def spread(self) -> float | None:
        """The best score minus the worst; 0 if they differ only by rounding errors.

        As `has_signal` tells, in double precision.
        """
        if self.scores is None:
            return None
        mean = fmean(self.scores)
        farthest = max(abs(one - mean) for one in self.scores)
        differ = farthest > RELATIVE_TOLERANCE * max(map(abs, self.scores))
        return max(self.scores) - min(self.scores) if differ else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """The rows of one place."""

    kind: str
    """prepared, cache or run; a file of completions counts as run."""
    rows: Sequence[ScoredRow]
    shares: Mapping[str, float] = field(default_factory=dict)
    """The shares of the sources by their weights, if they are known."""
    copies: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """``exact`` or ``near`` -> the splits of both rows -> copies of prompts that prepare found."""


def read_scored_rows(path: Path, split: str, measure: Measure) -> ScoredRows:
    """Read the rows of a directory, or of a file.

    Args:
        path: Of prepared data, of a cache, of a run, or of a file of completions, which runs,
            ``rewards`` and ``rescore`` write.
        split: The split of prepared data.
        measure: Gives the length of a text.

    Raises:
        UserError: it is none of these, has no rows, or is damaged.
    """
    if prepared := find_prepared(str(path)):
        return _read_prepared(prepared, split, measure)
    if any(path.glob(f"{PREFIX}*")) or (path / PROGRAM).is_dir():
        return ScoredRows(kind="cache", rows=[*_judged(path), *_checked(path, measure)])
    if (path / "completions").is_dir():
        return ScoredRows(kind="run", rows=_read_run(path, measure))
    if path.is_file() and path.suffix == ".parquet":
        return ScoredRows(kind="run", rows=[*_read_file(path, measure)])
    trials = [str(one) for one in sorted(path.glob("rewards*.parquet"))]
    if path.is_dir():
        got = f"one with {list_some(trials, 3)}" if trials else "one with other files"
    else:
        got = "a file" if path.exists() else f"nothing: there is no {path.absolute()}"
    writers = "prepare, precompute or fit has written" + (", or that file" if trials else "")
    raise UserError(
        f"{path} must be a directory of prepared data, a cache of gold scores, a run or a .parquet "
        f"file of completions, got {got}. Name one that {writers}."
    )


def _read_prepared(prepared: PreparedDir, split: str, measure: Measure) -> ScoredRows:
    rows = [_prepared_row(row.columns, measure) for row in prepared.split(split).stream()]
    sources: Mapping[str, Any] = prepared.manifest.get("sources", {})
    total = sum(one["weight"] for one in sources.values())
    shares = {name: one["weight"] / total for name, one in sources.items()}
    copies = prepared.manifest.get("duplicates", {})
    return ScoredRows(kind="prepared", rows=rows, shares=shares, copies=copies)


def _prepared_row(columns: Mapping[str, Any], measure: Measure) -> ScoredRow:
    scores, prompt = columns.get("gold_scores"), columns.get("prompt")
    if prompt is None:
        said = (one.get("content") or "" for one in columns.get("messages") or ())
        prompt = "\n".join(said)
    return ScoredRow(
        source=columns["source"],
        scores=None if scores is None else tuple(scores),
        is_compared=columns["kind"] == "open" or scores is not None,
        deviations=tuple(columns.get("gold_spread") or ()) if columns["kind"] == "open" else (),
        prompt_length=measure(prompt),
        answer_lengths=tuple(map(measure, columns.get("answers") or ())),
        text_hash=columns["text_hash"],
        nulls=tuple(name for name, value in columns.items() if value is None),
        pass_rate=columns.get(PASS_RATE),
        has_gradient=columns.get(HAS_GRADIENT),
    )


def _judged(cache: Path) -> Iterator[ScoredRow]:
    """Yield a row for each question of which an answer has votes."""
    for directory in sorted(cache.glob(f"{PREFIX}*")):
        highest = read_scale(directory)
        questions: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for key, votes in JudgeVotes(directory).all_votes():
            questions[key[:QUESTION_DIGITS]].append(tuple(votes.values()))
        for answers in questions.values():
            means = tuple(fmean(votes) / highest for votes in answers)
            yield ScoredRow(
                source=directory.name,
                scores=means if len(means) > 1 else None,  # others are still missing
                votes=tuple(answers),
                deviations=tuple(pstdev(votes) / highest for votes in answers if len(votes) > 1),
            )


def _checked(cache: Path, measure: Measure) -> Iterator[ScoredRow]:
    for checked in CheckedAnswers(cache).all_answers():
        yield ScoredRow(
            source=PROGRAM,
            scores=checked.gold_scores,
            answer_lengths=tuple(map(measure, checked.answers)),
        )


def _read_run(run: Path, measure: Measure) -> list[ScoredRow]:
    paths = chain.from_iterable(files_by_step(run).values())
    found = [row for path in paths for row in _read_file(path, measure)]
    if not found:
        raise UserError(f"{run} has no completions/step_*.parquet: name a run that has begun.")
    return found


def _read_file(path: Path, measure: Measure) -> Iterator[ScoredRow]:
    """Yield a row for each group of completions; one without two valid rewards has no scores.

    Raises:
        UserError: the file is damaged, or has something else.
    """
    names = ["step", "group", "prompt_id", "source", "prompt", "num_tokens", "reward", "valid"]
    table = read_completions(path, names)
    if missing := {"prompt_id", "prompt", "num_tokens", "reward", "valid"} - {*table.column_names}:
        raise UserError(
            f"{path} must be completions with their rewards, as runs, rewards and rescore write "
            f"them, got a file without {', '.join(sorted(missing))}. Rows of other files get "
            "scores by lit-grpo precompute and prepare."
        )
    of_step = groupby(table.to_pylist(), lambda row: row.get("step"))  # groups count from 0 in each
    for rows in chain.from_iterable(split_groups([*step]) for _, step in of_step):
        rewards = tuple(row["reward"] for row in rows if row["valid"])
        yield ScoredRow(
            source=rows[0].get("source") or "",
            scores=rewards if len(rewards) > 1 else None,
            prompt_length=measure(rows[0]["prompt"]),
            answer_lengths=tuple(row["num_tokens"] for row in rows),
        )
