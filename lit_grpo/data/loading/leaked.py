"""Find held-out prompts that are trained on as well."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.data.loading.loader import TrainingLoader
from lit_grpo.types import Prompt


def describe_leaked(train: TrainingLoader, held_out: Sequence[Prompt]) -> str:
    """Return a sentence if held-out prompts are also training prompts; else an empty text.

    They are the same if their texts and their gold answers are. Of training data that are not in
    memory only the prompts that a run is checked with are compared.
    """
    wanted = {(one.text, one.answer) for one in held_out}
    prompts = train.some_prompts() if wanted else ()
    found = {key for one in prompts if (key := (one.text, one.answer)) in wanted}
    num_leaked = sum((one.text, one.answer) in found for one in held_out)
    if not num_leaked:
        return ""
    least = "" if len(prompts) == train.num_prompts else "at least "
    return (
        f"{least}{num_leaked:,} of {len(held_out):,} held-out prompts are training prompts, too, "
        "with the same answer, so the held-out accuracy is too high. Remove them from data.train, "
        "or repeated rows from the data if data.validation_size holds out some of them (lit-grpo "
        "prepare does that); or set data.validation or data.test to other prompts."
    )
