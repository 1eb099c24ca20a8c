"""How the weights of a policy are spread over the ranks: by default each rank has all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

T = TypeVar("T")


class Sharding:
    """Keep the whole model on every rank, as on one device and under DDP.

    A strategy that shards the model overrides everything here.
    """

    is_sharded = False
    """Whether a forward pass is collective, so that every rank must make equally many."""

    device = "cpu"
    """Type of the device that the shards are on."""

    def shard(self, model: Any) -> None:
        """Shard a ``transformers`` model in place; every rank must call this."""

    def run(self, model: Any, function: Callable[[], T]) -> T:
        """Call a function that uses parts of the model, whose weights are then whole.

        The backward pass of what it returns works, too.
        """
        return function()

    def gathered(self, model: Any) -> AbstractContextManager[None]:
        """Keep all weights whole within the context, for many forward passes without gradients."""
        return nullcontext()


WHOLE = Sharding()
"""Every rank has the whole model."""
