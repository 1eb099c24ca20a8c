"""Which checkpoints a run keeps: the newest, the newest healthy one, and none of repeated steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from lit_grpo.runs.checkpoints.files import (
    BEST_FILE,
    Manifest,
    choose,
    is_healthy,
    link_last,
    newest_first,
    read_manifest,
    remove,
)

log = logging.getLogger(__name__)


class KeptCheckpoints:
    """The files ``step_*.ckpt`` of a run.

    Args:
        directory: Where they are.
        keep_last: Number of newest ones to keep. The newest one of a healthy run is kept, too.
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        self.left_behind: list[Path] = []
        """Checkpoints of steps that the run repeats, which its next one replaces."""
        self._directory = directory
        self._keep_last = keep_last

    def read_manifests(self) -> dict[Path, Manifest | None]:
        """Return the manifest of each, the newest first."""
        found = newest_first(self._directory, "step_*.ckpt")
        return {path: read_manifest(path) for path in found}

    def resume_from(
        self, resumed: Path, num_steps: int, manifests: Mapping[Path, Manifest | None]
    ) -> None:
        """Leave behind what is later than the checkpoint that a run resumes from, with a warning.

        From here on that checkpoint counts as the last, also before a new one is written.

        Args:
            resumed: The checkpoint.
            num_steps: The rollout steps that it has finished.
            manifests: What `read_manifests` returned.
        """
        best = self._directory / BEST_FILE
        self.left_behind = _later_than(num_steps, {**manifests, best: read_manifest(best)})
        if self.left_behind and resumed.resolve().parent == self._directory.resolve():
            choose(resumed.resolve())

    def add(self, path: Path) -> None:
        """Link a checkpoint as the last, and remove those that are no longer wanted."""
        link_last(path)
        for one in self.left_behind:
            if one != path:
                remove(one)
        self.left_behind = []
        self._remove_old()

    def _remove_old(self) -> None:
        manifests = self.read_manifests()
        healthy = next((path for path, one in manifests.items() if is_healthy(one)), None)
        for path in [*manifests][self._keep_last :]:
            if path != healthy:
                remove(path)


def _later_than(num_steps: int, manifests: Mapping[Path, Manifest | None]) -> list[Path]:
    """Return the checkpoints of more steps than these, and warn of them."""
    steps = {path: one.rollout_step or 0 for path, one in manifests.items() if one is not None}
    if later := {path: step for path, step in steps.items() if step > num_steps}:
        log.warning(
            "this run had got to rollout step %d, and goes on after step %d: what it had of the "
            "steps between is replaced (%s, rows of metrics.csv, completions). To keep such steps, "
            "copy the run directory before resuming from an earlier checkpoint.",
            max(later.values()),
            num_steps,
            ", ".join(path.name for path in later),
        )
    return [*later]
