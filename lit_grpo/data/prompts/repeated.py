"""Find prompts that a run cannot tell apart, and those that contradict each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from lit_grpo.data.rows.gold import contradict
from lit_grpo.types import Prompt
from lit_grpo.types.settings import list_some

NUM_SHOWN = 3


def describe_repeated(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a sentence for ids that several prompts have, and one for contradicting gold answers.

    An id of several prompts is not an error, since a run resumes without it.
    """
    counts = Counter(prompt.id for prompt in prompts)
    if repeated := [repr(one) for one, number in counts.items() if number > 1]:
        yield (
            f"{_number(repeated, 'id')} of more than one prompt, such as "
            f"{list_some(repeated, NUM_SHOWN)}: logs, completions and rescore name a prompt by its "
            "id. Set data.columns: {id: NAME} to a column without repetitions, or give the files "
            "different names."
        )
    golds: dict[str, dict[str, str]] = {}
    for prompt in prompts:
        if prompt.answer is not None:
            golds.setdefault(prompt.text, {}).setdefault(prompt.answer, prompt.id)
    if different := [pair for one in golds.values() if (pair := _contradicting(one))]:
        (first, one), (second, other) = different[0]
        yield (
            f"{_number(different, 'prompt')} with more than one gold answer, such as {first!r:.60} "
            f"of {one} and {second!r:.60} of {other}: they contradict each other. Repair or remove "
            "one of them."
        )


def _contradicting(golds: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the first of these answers and one that contradicts it, with their ids; or nothing."""
    first = next(iter(golds))
    other = next((one for one in golds if contradict(first, one)), None)
    return [] if other is None else [(first, golds[first]), (other, golds[other])]


def _number(found: Sequence[object], noun: str) -> str:
    return f"{len(found):,} {noun}{'s' * (len(found) > 1)}"
