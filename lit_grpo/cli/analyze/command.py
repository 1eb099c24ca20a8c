"""Run ``lit-grpo analyze``: measure rows with scores, and say whether they have a signal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from lit_grpo.cli.analyze.measures import Lengths, Measures, as_dict, measure
from lit_grpo.cli.analyze.scored_rows import Measure, ScoredRows, read_scored_rows
from lit_grpo.cli.file_options import parse_run_and_keys
from lit_grpo.cli.prepare.tables import copies_in_words
from lit_grpo.judge.client import CHARACTERS_PER_TOKEN
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.types import UserError, check_range, setting_error

TOO_LITTLE_SIGNAL = 1
"""Exit code if ``signal_useful_pct`` is below ``--min_signal``."""
PICTURES = (".png", ".svg")
BARS = "·▁▂▃▄▅▆▇█"


def analyze(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the arguments or the data are wrong.
    """
    given, keys = parse_run_and_keys("analyze", arguments)
    check_range("threshold", given.threshold, at_least=0)
    check_range("min_signal", given.min_signal, at_least=0, at_most=100)
    _check_picture(given.picture)
    path = Path(given.run_dir)
    if path.suffix == ".parquet":  # the file of a split
        given.split = path.stem
    if given.policy is not None:
        from lit_grpo.cli.analyze.pass_rates import write_pass_rates

        if code := write_pass_rates(given, keys):
            return code
    found = read_scored_rows(path, given.split, _length(given.tokenizer))
    threshold = given.threshold
    if threshold is None:
        threshold = 0.0 if found.kind == "run" else 0.1
    measured = measure(found, threshold)
    unit = "tokens" if given.tokenizer else f"characters / {CHARACTERS_PER_TOKEN}"
    signal = measured["all"].signal_useful_pct
    if given.json:
        about = {
            "data": str(path),
            "kind": found.kind,
            "threshold": threshold,
            "length_unit": unit,
            "duplicates_when_prepared": found.copies,
            "measures": as_dict(measured),
        }
        print(json.dumps(about, indent=1))
    else:
        _print(found, measured, threshold, unit)
    if given.picture is not None:
        from lit_grpo.cli.analyze.pictures import draw_rows

        draw_rows(found, threshold, unit, Path(given.picture))
        if not given.json:
            print(f"picture: {given.picture}")
    if given.min_signal is None:
        return ExitCode.DONE
    return _check_signal(given.min_signal, signal, path)


def _check_signal(least: float, signal: float | None, path: Path) -> int:
    """Return the exit code of rows with this signal, and say why if it is too low.

    Raises:
        UserError: no rows are compared by scores.
    """
    if signal is None:
        raise UserError(
            f"min_signal needs rows that are compared by scores, and {path} has none. Leave "
            "--min_signal out, or score its rows by lit-grpo precompute."
        )
    if signal >= least:
        return ExitCode.DONE
    print(f"signal {signal:g}% is below --min_signal {least:g}", file=sys.stderr)
    return TOO_LITTLE_SIGNAL


def _check_picture(path: str | None) -> None:
    """Raise UserError unless a picture of this name can be drawn."""
    if path is not None and Path(path).suffix not in PICTURES:
        raise setting_error("--picture", f"a name that ends in {' or '.join(PICTURES)}", path)
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise UserError(
            f"picture must be in a directory that exists, got {path}. Make it, or set --picture."
        )
    if path is not None:
        check_writable("--picture", path, Path(path).parent)


def _length(tokenizer: str | None) -> Measure:
    """Return what measures a text: a tokenizer if one is given."""
    if tokenizer is None:
        return lambda text: len(text) / CHARACTERS_PER_TOKEN
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"tokenizer must be the path or the Hub id of a model or a tokenizer, got {tokenizer} "
            f"({type(error).__name__} while loading it). Set --tokenizer."
        ) from error
    return lambda text: len(loaded(text, add_special_tokens=False)["input_ids"])


def _print(
    found: ScoredRows, measured: Mapping[str, Measures], threshold: float, unit: str
) -> None:
    console = open_console()
    table = make_table("")
    add_numbers(table, *measured)
    columns = [_cells(one) for one in measured.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    if found.shares and len(measured) > 1:
        names = [name for name in measured if name != "all"]
        shares = (f"{found.shares[name]:.0%}" if name in found.shares else "" for name in names)
        table.add_row("share by weight", "", *shares)
    console.print(table)
    answers = "; those of completions in tokens" if found.kind == "run" else ""
    for line in (
        f"signal: the best and the worst score of a row differ by {threshold:g} or more"
        if threshold
        else "signal: not all scores of a row are equal",
        f"spreads: rows by that difference, from 0 to {measured['all'].spread_max:g}",
        f"lengths in {unit}{answers}",
    ):
        console.print(line, soft_wrap=True)
    _print_nulls(measured["all"], console)
    for line in _of_policy(measured["all"]):
        console.print(line, soft_wrap=True)
    for line in copies_in_words(found.copies):
        console.print(f"when it was prepared: {line}", soft_wrap=True)


def _cells(one: Measures) -> dict[str, str]:
    signal = one.signal_useful_pct
    return {
        "rows": f"{one.num_rows:,}",
        "share": f"{one.share:.0%}",
        "compared by scores": f"{one.num_compared:,}",
        "without scores": f"{one.num_null:,}",
        "signal": "–" if signal is None else f"{signal:.1f}%",
        "spreads": _bars(one.spread_histogram),
        "agreement of votes": "–" if one.vote_agreement is None else f"{one.vote_agreement:.0%}",
        "deviation of votes": "–" if one.vote_deviation is None else f"{one.vote_deviation:.3f}",
        "prompt lengths": _lengths(one.prompt_lengths),
        "answer lengths": _lengths(one.answer_lengths),
        "pass rate": "–" if one.pass_rates is None else f"{one.pass_rates.mean:.1%}",
        "duplicates": "–" if one.num_duplicates is None else f"{one.num_duplicates:,}",
    }


def _of_policy(one: Measures) -> Iterator[str]:
    """Yield the line on rows that a policy always or never gets right, which teach it nothing."""
    if rates := one.pass_rates:
        yield (
            f"{rates.num_rows:,} rows with a pass rate: {rates.num_never:,} never right, "
            f"{rates.num_always:,} always right"
        )
    if one.num_sampled:
        yield (
            f"{one.num_without_gradient:,} of {one.num_sampled:,} rows would give the policy no "
            "gradient: all its completions have the same score"
        )


def _lengths(one: Lengths | None) -> str:
    if one is None:
        return "–"
    return f"{one.p50:.0f} ({one.p5:.0f} to {one.p95:.0f}, at most {one.max:.0f})"


def _bars(counts: Sequence[int]) -> str:
    """Return a bar for each number, the highest for the most rows; only 0 is a dot."""
    most = max(counts, default=0)
    if not most:
        return "–"
    return "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)


def _print_nulls(one: Measures, console: Console) -> None:
    if one.nulls:
        named = ", ".join(f"{name} {number:,}" for name, number in one.nulls.items())
        console.print(f"null in some rows of a source: {named}", soft_wrap=True)
