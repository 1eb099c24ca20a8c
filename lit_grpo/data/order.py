"""The order in which the rows of one source are trained on, whatever other sources there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from lit_grpo.types import Prompt


class RowOrder(Protocol):
    """The prompts of one source, without end, in an order that its seed and position determine.

    Every rank has one with the same state, and takes the same numbers.
    """

    name: str
    """The name of the source, which its prompts carry."""
    num_rows: int | None
    """None for a stream, whose rows nobody has counted."""
    fingerprint: str
    """Differs between sources with different rows, so that a run is not resumed on other ones."""

    def take(self, number: int) -> list[Prompt]:
        """Return the next prompts; rows whose prompts are too long are passed over."""

    def prepare_ahead(self, number: int) -> None:
        """Begin to build that many prompts after those taken; never changes what `take` returns."""

    def position(self) -> Any:
        """Return where the order stands, for `move_to`; cheap enough to be asked at each step."""

    def move_to(self, position: Any) -> None:
        """Go back to a position that was returned since the last load."""

    def some_prompts(self, limit: int) -> Sequence[Prompt]:
        """Return all prompts, or as many that are spread over the rows."""

    def find(self, ids: Collection[str]) -> Mapping[str, Prompt]:
        """Return the prompts with these ids; those that there are not are left out."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: numbers, texts, lists and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
