"""Show how many votes are done: a bar on a terminal, otherwise a line a minute."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lit_grpo.cli.precompute.judge_gold import VoteCounts
from lit_grpo.cli.prepare.gold_cache import JudgeVotes
from lit_grpo.runs.tables import duration

SECONDS_PER_LINE = 60.0


class VoteProgress:
    """Counts the votes that all processes add, the failures and the costs.

    Args:
        cache: Where the votes arrive.
        num_missing: Votes that are missing at the start.
        has_price: Whether costs are known.
    """

    def __init__(self, cache: JudgeVotes, num_missing: int, has_price: bool) -> None:
        self._cache, self._num_missing, self._has_price = cache, num_missing, has_price
        self._num_before = cache.num_votes
        self._start = self._printed = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("votes"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("votes", total=num_missing, note="")

    def __enter__(self) -> VoteProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, counts: VoteCounts) -> None:
        """Show the numbers of this moment."""
        done = min(self._cache.num_votes - self._num_before, self._num_missing)
        now = time.monotonic()
        note = self.note(done, counts.failures.total(), now - self._start)
        self._bar.update(self._task, completed=done, note=note)
        if self._bar.disable and now > self._printed + SECONDS_PER_LINE:
            self._printed = now
            print(f"votes {done:,}/{self._num_missing:,} {note}", file=sys.stderr, flush=True)

    def note(self, num_done: int, num_failed: int, seconds: float) -> str:
        """Return rate, failures, costs and the time that is left, in words."""
        rate = num_done / seconds if seconds else 0.0
        parts = [f"{rate:.1f}/s" if rate < 10 else f"{rate:.0f}/s", f"{num_failed:,} failed"]
        if self._has_price:
            parts.append(f"${self._cache.spent_usd:.2f}")
        left = self._num_missing - num_done - num_failed
        if rate and left > 0:
            parts.append(f"{duration(left / rate)} left")
        return "  ".join(parts)
