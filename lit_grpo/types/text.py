"""Make text that was received encodable as UTF-8."""

from __future__ import annotations


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: a surrogate without its pair becomes U+FFFD.

    JSON may have one, for instance where a model was cut off within an emoji.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
