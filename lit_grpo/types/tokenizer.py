"""The part of a tokenizer that the packages use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a ``transformers`` tokenizer that this package uses."""

    @property
    def bos_token(self) -> Any: ...
    @property
    def eos_token_id(self) -> Any: ...
    @property
    def pad_token_id(self) -> Any: ...
    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    @property
    def chat_template(self) -> Any: ...
    def __call__(self, text: str, **kwargs: Any) -> Any: ...
    def decode(self, token_ids: list[int], **kwargs: Any) -> Any: ...
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def save_pretrained(self, save_directory: str) -> Any: ...


def starts_with_bos(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text has its beginning-of-text token, so none must be added."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
