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

    A word with the same letters, in another case, is the closest. Of several others that are close,
    the closest with the same first letter is taken; of equally close ones the one that begins alike
    for longest.

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
