"""Verdicts that outlive a run: paid once, read by every later run that asks the same.

Only verdicts are kept, never a failure.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from pathlib import Path
from typing import Any

from lit_grpo.judge.reply import Verdict
from lit_grpo.types import UserError

log = logging.getLogger(__name__)


class VerdictCache:
    """An sqlite file in a directory, which any number of processes on one machine may share.

    Raises:
        ValueError: the package diskcache is missing, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import diskcache
        except ModuleNotFoundError:
            raise UserError(
                "a judge's cache needs the package diskcache, which is not installed. "
                "Install it with: pip install 'lit-grpo[judge]'."
            ) from None

        class JsonAlone(diskcache.JSONDisk):
            """Loads no pickle, as JSONDisk would: one in a shared directory could do anything."""

            def fetch(self, mode: int, *place: Any) -> Any:
                if mode == diskcache.core.MODE_PICKLE:
                    raise UserError("an entry that is a pickle")
                return super().fetch(mode, *place)

        try:
            # Nothing is evicted: each entry was paid for.
            self._entries = diskcache.Cache(
                str(directory.expanduser()), disk=JsonAlone, eviction_policy="none"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"the judge's cache must be a directory that can be written, got {directory} "
                f"({error}). Set cache of the judge."
            ) from error
        self._has_warned = False

    def get(self, key: str) -> Verdict | None:
        """What was kept; an entry that cannot be read is as good as none."""
        try:
            found = self._entries.get(key)
        except (OSError, ValueError, sqlite3.Error, zlib.error):
            return None
        return found.get("verdict") if isinstance(found, dict) else None

    def put(self, key: str, verdict: Verdict) -> None:
        """Keeps a verdict; one that cannot be written is lost with a warning, not an error."""
        try:
            self._entries.set(key, {"verdict": dict(verdict)})
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("verdicts cannot be kept in %s: %s", self._entries.directory, error)

    def close(self) -> None:
        self._entries.close()


def cache_key(**parts: Any) -> str:
    """A digest of everything that a verdict depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
