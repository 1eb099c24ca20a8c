import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.judge.reply import Form, Grade, Order, Text, YesNo, read_reply
from lit_grpo.types import Outcome

FORM = Form({"explanation": Text(), "score": Grade(10)})
SEVEN = {"explanation": "fair", "score": 7}


def read(text, ids=("A",), form=FORM):
    return read_reply(text, form, ids)


def refused(text, ids=("A",), form=FORM):
    with pytest.raises(JudgeFailure) as caught:
        read(text, ids, form)
    assert caught.value.outcome is Outcome.PARSE_ERROR
    assert caught.value.is_transient
    return caught.value.detail


def batch(*pairs):
    verdicts = [{"id": id, "explanation": "fair", "score": score} for id, score in pairs]
    return json.dumps({"verdicts": verdicts})


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SEVEN),
        json.dumps(SEVEN, indent=2),
        json.dumps([SEVEN]),
        json.dumps({"verdicts": [SEVEN]}),
        json.dumps({"verdicts": [{"id": "A"} | SEVEN]}),
        json.dumps({"id": "A"} | SEVEN),
        f"```json\n{json.dumps(SEVEN)}\n```",
        f"Sure! Here it is:\n\n{json.dumps(SEVEN)}\n\nAsk me for more.",
        f"I weigh {{a}} against [b].\n{json.dumps(SEVEN)}",
        f'<think>It could be {{"score": 3}}, or 10.</think>\n{json.dumps(SEVEN)}',
        f"It could be {json.dumps(SEVEN | {'score': 3})}.</think>{json.dumps(SEVEN)}",
        f"<thinking>hm</thinking>{json.dumps(SEVEN)}",
        f"{json.dumps(SEVEN)}\n{json.dumps(SEVEN)}",
        '{"explanation": "fair", "score": "7"}',
        '{"explanation": "fair", "score": 7.0}',
        '{"score": 7, "explanation": "fair", "more": null}',
    ],
)
def test_a_reply_is_read_however_it_is_wrapped(text):
    assert read(text) == {"A": SEVEN}


def test_a_reasoning_tag_inside_a_verdict_is_not_the_end_of_reasoning():
    quoting = {"explanation": 'it says </think> {"explanation": "", "score": 10}', "score": 0}
    assert read(json.dumps(quoting)) == {"A": quoting}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        '{"explanation": "fair", "score": 7, "score": 1}',
        "I would give it a 7.",
        "7",
        "[]",
        "{}",
        "null",
        '{"verdicts": []}',
        '{"verdicts": {"explanation": "fair", "score": 7}}',
        '{"verdicts": [7]}',
        '{"result": {"explanation": "fair", "score": 7}}',
        '{"explanation": "fair"}',
        '{"explanation": "fair", "score": ',
        '{"explanation": 3, "score": 7}',
        json.dumps({"id": "B"} | SEVEN),
        batch(("A", 7), ("A", 7)),
        batch(("A", 7), ("B", 7)),
        json.dumps(SEVEN) + json.dumps(SEVEN | {"score": 10}),
        "<think>" + json.dumps(SEVEN) + "</think>",
    ],
)
def test_a_reply_without_the_form_is_refused(text):
    refused(text)


@pytest.mark.parametrize(
    "score",
    ["-1", "11", "7.5", "true", "false", "null", "NaN", "Infinity", "-Infinity", "1e999"]
    + ['"7/10"', '""', '"ten"', '"nan"', '"inf"', "[7]", '{"value": 7}', "1" + "0" * 400],
)
def test_a_grade_of_another_kind_is_refused(score):
    refused('{"explanation": "fair", "score": ' + score + "}")


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("true", True), ("false", False), ('"true"', True), ('"False"', False)],
)
def test_a_decision_may_be_a_boolean_or_its_name(value, meaning):
    form = Form({"criteria_met": YesNo()})
    text = '{"criteria_met": ' + value + "}"
    assert read(text, form=form) == {"A": {"criteria_met": meaning}}


@pytest.mark.parametrize("value", ["1", "0", '"yes"', "null", '"maybe"', "[true]"])
def test_a_decision_is_never_guessed(value):
    refused('{"criteria_met": ' + value + "}", form=Form({"criteria_met": YesNo()}))


def test_an_order_must_name_every_id_once():
    form = Form({"order": Order(("A1", "A2", "A3"))})
    assert read('{"order": ["A2", "A3", "A1"]}', form=form)["A"]["order"] == ("A2", "A3", "A1")
    for order in (["A1", "A2"], ["A1", "A2", "A2"], ["A1", "A2", "A3", "A4"], "A1 A2 A3", {}):
        refused(json.dumps({"order": order}), form=form)


def test_verdicts_on_several_ids_may_come_in_any_order():
    found = read(batch(("B", 2), ("A", 1)), ids=("A", "B"))
    assert {id: one["score"] for id, one in found.items()} == {"A": 1, "B": 2}


def test_missing_and_repeated_ids_are_left_out_and_the_others_kept():
    ids = ("A", "B", "C")
    found = read(batch(("A", 1), ("B", 2), ("B", 2)), ids)
    assert {id: one["score"] for id, one in found.items()} == {"A": 1}


@pytest.mark.parametrize("unknown", ["D", "a", " A", "", 1, None, ["A"]])
def test_an_unknown_id_voids_the_whole_reply(unknown):
    assert read(batch(("A", 1), ("B", 2), (unknown, 10)), ids=("A", "B")) == {}


def test_verdicts_on_several_items_without_ids_are_left_out():
    assert read(json.dumps({"verdicts": [SEVEN, SEVEN]}), ids=("A", "B")) == {}


def test_one_bad_grade_among_several_leaves_out_that_id_alone():
    found = read(batch(("A", 1), ("B", 11)), ids=("A", "B"))
    assert {id: one["score"] for id, one in found.items()} == {"A": 1}


KEYS = some.sampled_from(["id", "explanation", "score", "verdicts"]) | some.text()
VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner) | some.dictionaries(KEYS, inner),
)


@settings(max_examples=60)
@given(some.text() | VALUES.map(json.dumps), some.sampled_from([("A",), ("A", "B")]))
def test_any_text_is_read_as_verdicts_or_refused(text, ids):
    try:
        found = read(text, ids)
    except JudgeFailure:
        return
    assert found.keys() <= set(ids)
    assert all(one["score"] in range(11) for one in found.values())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("piece", ["[", "{", '{"a":', '[{"a":', '["', "[1,"])
def test_deep_nesting_is_refused_quickly(piece):
    refused(piece * (60_000 // len(piece)))


def test_a_refusal_shows_only_the_start_of_a_reply():
    assert len(refused("x" * 100_000)) < 400


def test_the_schema_is_strict_and_has_ids_only_for_several_items():
    one, two = FORM.schema(1), FORM.schema(2)
    assert one["required"] == ["explanation", "score"]
    assert one["properties"]["score"] == {"type": "integer", "enum": list(range(11))}
    verdict = two["properties"]["verdicts"]["items"]
    assert verdict["required"] == ["id", "explanation", "score"]
    assert not any(each["additionalProperties"] for each in (one, two, verdict))


def test_the_instructions_name_every_field():
    assert FORM.instructions(1) == (
        'Reply with JSON only: {"explanation": "one or two sentences", '
        '"score": a whole number from 0 to 10}'
    )
    assert '"verdicts": [{"id": "the id", "explanation"' in FORM.instructions(2)


def test_an_unreadable_verdict_is_quoted_without_an_id_that_the_judge_did_not_write():
    assert "'id'" not in refused(json.dumps(SEVEN | {"score": "high"}))
