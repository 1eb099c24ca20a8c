"""What a run has spent on a judge, in a small file that a kill does not undo.

A checkpoint also has the sum, but not what was spent after it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

DIRECTORY = "judge_costs"
"""Name of the directory of these files in that of a run."""


class SpendingFile:
    """The US dollars that one process has spent on one deployment, kept up to date at each call.

    Args:
        directory: Directory of the run.
        deployment: Address and model of the judge.
        rank: The process.
    """

    def __init__(self, directory: Path, deployment: tuple[str, str], rank: int) -> None:
        digest = hashlib.sha256(repr(deployment).encode()).hexdigest()[:12]
        self.path = directory / DIRECTORY / f"{digest}_rank{rank}.json"
        self._stem, self._model = f"{digest}_rank", deployment[1]
        self._descriptor: int | None = None
        self._has_warned = False

    def of_ranks_from(self, world_size: int) -> list[Path]:
        """Return the files of higher ranks, which an earlier part of the run has had."""
        ranks = {
            path: int(path.stem.removeprefix(self._stem))
            for path in self.path.parent.glob(f"{self._stem}*.json")
        }
        return [path for path, rank in ranks.items() if rank >= world_size]

    def write(self, usd: float) -> None:
        """Replace the sum, in one write of fixed length, which a kill cannot tear."""
        text = json.dumps({"spent_usd": f"{usd:20.8f}", "model": self._model}) + "\n"
        try:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self._descriptor, text.encode(), 0)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "what the judge costs could not be written to %s (%s): after a kill, a resumed "
                    "run counts only what its checkpoint says",
                    *(self.path, error.strerror),
                )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_all(paths: list[Path]) -> float:
    """Return the sum of several files; 0 for one that does not exist."""
    return sum(map(_read, paths))


def _read(path: Path) -> float:
    try:
        return float(json.loads(path.read_text())["spent_usd"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
