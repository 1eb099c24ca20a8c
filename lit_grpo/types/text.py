"""Texts that were received: encodable as UTF-8, and short enough for a line."""

from __future__ import annotations

SHOWN_CHARACTERS = 120


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: a surrogate without its pair becomes U+FFFD.

    JSON may have one, for instance where a model was cut off within an emoji.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def shorten(text: str) -> str:
    """Return the end of a long text, where the cause of an error or the final answer is."""
    text = text.strip()
    return text if len(text) <= SHOWN_CHARACTERS else "…" + text[-SHOWN_CHARACTERS:]


def shorten_middle(text: str) -> str:
    """Return the start and the end of a long text: what failed, and why."""
    text = text.strip()
    start = SHOWN_CHARACTERS // 3
    end = SHOWN_CHARACTERS - start
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:start]} … {text[-end:]}"
