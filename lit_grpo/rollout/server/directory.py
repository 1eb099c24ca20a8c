"""The directory of an engine with servers: weights, a base model, logs and a failure note."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path
from uuid import uuid4

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.rollout.scratch import ScratchDirectory
from lit_grpo.types import setting_error

log = logging.getLogger(__name__)

FAILURE_NOTE = "failed.txt"


class EngineDirectory:
    """A directory that all ranks share; rank 0 creates and removes what is in it.

    Its constructor is collective: all ranks must call it together.

    Args:
        configured: The directory that the user set; None for a temporary one.
        is_rank_zero: Whether this rank creates and removes its contents.
    """

    def __init__(self, configured: str | None, *, is_rank_zero: bool) -> None:
        self._is_rank_zero = is_rank_zero
        self._scratch: ScratchDirectory | None = None
        if is_rank_zero and configured is None:
            self._scratch = ScratchDirectory("lit-grpo-engine-")
        elif is_rank_zero and configured is not None:
            # A failure note that an earlier run left would end this one.
            Path(configured, FAILURE_NOTE).unlink(missing_ok=True)
        mine = self._scratch.path if self._scratch else Path(configured or "")
        self.path = Path(gather_objects(str(mine.absolute()))[0])
        self._check_shared()
        self.failure_note = FailureNote(self.path / FAILURE_NOTE)

    def _check_shared(self) -> None:
        """Check that every rank sees what rank 0 writes.

        Raises:
            UserError: one does not.
        """
        mark = self.path / f"shared-{gather_objects(uuid4().hex)[0]}"
        if self._is_rank_zero:
            self.path.mkdir(parents=True, exist_ok=True)
            mark.touch()
        gather_objects(None)  # the mark exists
        found = gather_objects((socket.gethostname(), mark.exists()))
        if self._is_rank_zero:
            mark.unlink(missing_ok=True)
        if apart := sorted({host for host, is_seen in found if not is_seen}):
            raise setting_error(
                "model.engine.init_args.directory",
                "a directory that all machines see under the same path",
                f"{self.path}, which rank 0 writes and {', '.join(apart)} does not see",
                "rank 0 tells the other ranks there that the servers have failed, and servers read "
                "the weights from it",
            )

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def api_key(self) -> Path:
        return self.path / "api_key"

    def close(self, *, has_failed: bool) -> None:
        """Remove weights, model and key; a temporary directory is kept if the engine failed."""
        if not self._is_rank_zero:
            return
        for path in (self.weights, self.model, self.api_key):
            shutil.rmtree(path, ignore_errors=True)
        if self._scratch is not None and has_failed:
            self._scratch.keep()
        elif self._scratch is not None:
            self._scratch.remove()


class FailureNote:
    """A file in which rank 0 tells the other ranks that the engine has failed, and why."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, message: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(message)
        except OSError as error:
            log.error("The other ranks could not be told that the engine has failed: %s", error)

    def read(self) -> str:
        """Return the message; empty if there is none."""
        return self._path.read_text() if self._path.exists() else ""
