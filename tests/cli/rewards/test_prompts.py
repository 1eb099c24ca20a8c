"""The prompts that rewards are tried on: every source of a mixture has some."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tiny import prompt

from lit_grpo.cli.rewards.prompts import trial_prompts
from lit_grpo.data.loading.curriculum import Curriculum, Phase
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.data.loading.mixture_loader import MixtureLoader
from lit_grpo.data.loading.order import TableOrder


def mixture(sizes: dict[str, int], **weights: float) -> MixtureLoader:
    """Return a loader of 2 prompts per step, of the sources with weights."""
    orders = [
        TableOrder(name, [replace(prompt(id=f"{n}"), source=name) for n in range(size)], (0,))
        for name, size in sizes.items()
    ]
    curriculum = Curriculum(phases=(Phase(weights=weights, fraction=1.0),))
    return MixtureLoader(orders, 2, curriculum, lambda ahead: 0)


@pytest.mark.parametrize(
    ("sizes", "number", "counts"),
    [
        ({"a": 9, "b": 9}, 8, {"a": 4, "b": 4}),
        ({"a": 9, "b": 9}, 5, {"a": 3, "b": 2}),
        ({"a": 9, "b": 2}, 8, {"a": 6, "b": 2}),
        ({"a": 2, "b": 2}, 8, {"a": 2, "b": 2}),
        ({"a": 9, "b": 9, "c": 9}, 2, {"a": 1, "b": 1}),
    ],
)
def test_sources_have_equally_many_prompts_whatever_their_weights(sizes, number, counts):
    found = trial_prompts(mixture(sizes, a=1.0), number)
    assert Counter(one.source for one in found) == counts
    assert len({(one.source, one.id) for one in found}) == len(found)


def test_those_of_a_source_are_the_first_of_a_run():
    loader, same = (mixture({"a": 9, "b": 9}, a=0.5, b=0.5) for _ in range(2))
    batches = iter(same)
    first = [*next(batches), *next(batches)]
    found = trial_prompts(loader, 4)
    assert {(one.source, one.id) for one in found} == {(one.source, one.id) for one in first}


def test_without_a_mixture_they_are_the_first_of_a_run():
    prompts = [prompt(id=f"{n}") for n in range(9)]
    loader, same = PromptLoader(prompts, 3), PromptLoader(prompts, 3)
    batches = iter(same)
    assert trial_prompts(loader, 5) == [*next(batches), *next(batches)][:5]
