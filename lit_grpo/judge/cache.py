"""A cache of verdicts on disk, which saves later runs from paying for the same question again.

Failures are never cached.
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
    """An sqlite database in a directory, safe to share between the processes of one machine.

    Raises:
        UserError: the package diskcache is missing, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import diskcache
        except ModuleNotFoundError:
            raise UserError(
                "a judge's cache needs the package diskcache, which is not installed. "
                "Install it with: pip install 'lit-grpo[judge]'."
            ) from None

        class JSONOnlyDisk(diskcache.JSONDisk):  # type: ignore[misc]  # diskcache has no types
            """Refuse pickles, which JSONDisk would load: the directory may be shared."""

            def fetch(self, mode: int, *arguments: Any) -> Any:
                if mode == diskcache.core.MODE_PICKLE:
                    raise ValueError("the entry is a pickle")
                return super().fetch(mode, *arguments)

        try:
            # Entries are never evicted, since each was paid for.
            self._entries = diskcache.Cache(
                str(directory.expanduser()), disk=JSONOnlyDisk, eviction_policy="none"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"judge.cache must be a writable directory, got {directory} "
                f"({error}). Set judge.cache."
            ) from error
        self._has_warned = False

    def get(self, key: str) -> Verdict | None:
        """Return the cached verdict, or None if there is none or it cannot be read."""
        try:
            entry = self._entries.get(key)
        except (OSError, ValueError, sqlite3.Error, zlib.error):
            return None
        return entry.get("verdict") if isinstance(entry, dict) else None

    def put(self, key: str, verdict: Verdict) -> None:
        """Store a verdict. A failed write is logged once and never raised."""
        try:
            self._entries.set(key, {"verdict": dict(verdict)})
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("cannot write verdicts to %s: %s", self._entries.directory, error)

    def close(self) -> None:
        self._entries.close()


def cache_key(**parts: Any) -> str:
    """Return a digest of everything that a verdict depends on."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
