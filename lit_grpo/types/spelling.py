"""Find the word that was meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return `` Did you mean X?`` for the `closest` known word, or nothing if none is close."""
    best = closest(word, known, similarity=similarity)
    return f" Did you mean {best}?" if best else ""


def closest(word: str, known: Iterable[str], *, similarity: float = 0.6) -> str:
    """Return the closest known word; empty if none is close.

    A match that differs only in case wins; then one with the same first letter, then the most
    similar one, then the one with the longest common beginning.

    Args:
        similarity: From which a word is close; 1 is the same word.
    """
    words = list(known)
    same = [one for one in words if one.lower() == word.lower()]
    close = same or difflib.get_close_matches(word, words, n=3, cutoff=similarity)

    def fitness(one: str) -> tuple[bool, float, int]:
        similarity = difflib.SequenceMatcher(None, one, word).ratio()
        return one[:1] == word[:1], similarity, len(os.path.commonprefix([one, word]))

    return max(close, key=fitness, default="")


def other_form(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for a known word that is a shorter or a longer form, or nothing.

    Such as ``coef`` for ``coefficient``, and ``epochs`` for ``num_epochs``; of several the one of
    the closest length.
    """
    forms = [one for one in known if _is_longer(one, word) or _is_longer(word, one)]
    best = min(forms, key=lambda one: (abs(len(one) - len(word)), one), default="")
    return f" Did you mean {best}?" if best else ""


def _is_longer(one: str, other: str) -> bool:
    is_continued = len(other) > 3 and one.startswith(other)
    counted = one in {f"{prefix}_{other}" for prefix in ("num", "max", "min")}
    return is_continued or one.startswith(f"{other}_") or counted
