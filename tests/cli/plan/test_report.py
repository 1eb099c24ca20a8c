"""A plan in words and in JSON, with setups of small round numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from setups import SIZES, UNIT, make

from lit_grpo.cli.estimate.memory import ELSEWHERE, estimate_memory, gib
from lit_grpo.cli.estimate.seconds import estimate_seconds
from lit_grpo.cli.estimate.sharding import SHARDINGS
from lit_grpo.cli.plan.report import Plan, describe, seconds, to_json

LARGE = 2**40


def plan(*arguments, limit=LARGE, num_scores=0, remedies=(), setup=(), **settings) -> Plan:
    made = make(*arguments, **dict(setup))
    return Plan(
        setup=made,
        memory=estimate_memory(made),
        limit=limit,
        time=estimate_seconds(made, num_scores),
        remedies=remedies,
        **settings,
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "?"), (0.01234, "0.0123 s"), (12.345, "12.3 s"), (999.4, "999 s"), (1234.5, "1,234 s")],
)
def test_a_time_has_three_digits_or_a_question_mark(value, shown):
    assert seconds(value) == shown


def test_the_first_sentence_says_what_was_planned():
    first, *_ = describe(plan("fsdp2", 4))
    assert first == (
        "1 k parameters on 4 x H100, fsdp2, 32-true: 16 completions of up to 10 tokens a rollout "
        "step, prompts of up to 6; micro-batches of up to 52 tokens, 1 in each optimizer step."
    )
    model = replace(SIZES, trained_parameters=100)
    assert describe(plan(setup={"model": model}))[0].startswith("1 k parameters, 100 of them ")


def test_lengths_that_were_assumed_are_said():
    assert len(describe(plan())) == 3
    said = describe(plan(assumed_prompt_tokens=512, missing="tokenizer"))[1]
    assert said.startswith("The tokenizer could not be read: all prompts are taken to have 512 ")


def test_memory_that_does_not_fit_has_its_remedies_as_advice():
    fitting, full = plan(), plan(limit=1, remedies=("use less", "or more"))
    assert (fitting.fits, full.fits) == (True, False)
    assert "Memory fits: " in describe(fitting)[1]
    assert "To lower it, " in describe(fitting)[1]
    line = describe(full)[1]
    assert line.startswith("Memory does not fit: ")
    assert line.endswith(" It fits if you use less; or or more.")
    assert full.advice == ("use less", "or more")


def test_what_is_offloaded_is_counted_for_all_ranks_of_a_node():
    sharding = replace(SHARDINGS["fsdp2"], offloads_optimizer=True)
    found = plan("fsdp2", 4, setup={"sharding": sharding})
    size = sum(one.bytes for one in found.memory.parts if one.when == ELSEWHERE)
    assert size > 0
    expected = f"A node needs {gib(4 * size)} of host memory for what is offloaded."
    assert expected in describe(found)


def test_parts_whose_time_is_not_known_are_named():
    line = describe(plan(num_scores=None))[-1]
    assert " without scoring, which is not known, " in line
    assert "which is not known" not in describe(plan())[-1]


def test_sampled_tokens_are_those_of_all_ranks_over_the_time():
    found = plan("ddp", 2, setup={"device": UNIT})
    assert found.tokens_per_second == pytest.approx(2 * 4 * 10 / found.time.total)


def test_json_has_every_part_and_the_sentences():
    found = plan("fsdp2", 4)
    held = json.loads(json.dumps(to_json(found)))
    assert (held["device"], held["gpus_per_node"], held["nodes"]) == ("H100", 4, 1)
    assert (held["strategy"], held["parameters"], held["fits"]) == ("fsdp2", 1000, True)
    parts = {one["name"]: one["bytes"] for one in held["memory"]["parts"]}
    assert parts == {one.name: one.bytes for one in found.memory.parts}
    assert held["memory"]["peak"] == found.memory.peak
    names = [one["name"] for one in held["seconds"]["parts"]]
    assert names == [one.name for one in found.time.parts]
    assert held["notes"] == describe(found)
