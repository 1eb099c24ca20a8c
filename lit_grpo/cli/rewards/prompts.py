"""Choose the prompts that rewards are tried on: of a mixture, some of every source."""

from __future__ import annotations

from itertools import chain, islice

from lit_grpo.data import TrainingLoader
from lit_grpo.types import Prompt


def trial_prompts(loader: TrainingLoader, number: int) -> list[Prompt]:
    """Return the first prompts of a run; of a mixture, the same number from each source.

    A source that a run seldom samples would otherwise not be tried at all. One with too few rows
    leaves its place to the others.
    """
    if not loader.sources:
        return list(islice(chain.from_iterable(loader), number))
    found: dict[tuple[str, str], Prompt] = {}
    waiting = list(loader.sources)
    while waiting and len(found) < number:
        source = waiting.pop(0)
        (prompt,) = loader.take({source: 1})[source]
        if (source, prompt.id) not in found:  # else all its rows were taken
            found[source, prompt.id] = prompt
            waiting.append(source)
    return [*found.values()]
