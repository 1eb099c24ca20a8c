import pytest
from tiny import completion

from lit_grpo.types import Outcome, Score
from lit_grpo.types.text import encodable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, é and 😀", "plain, é and 😀"),
        ("a \ud83d b", "a \ufffd b"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("a pair in two: \ud83d\ude00", "a pair in two: 😀"),
    ],
)
def test_only_surrogates_without_their_pair_are_replaced(text, expected):
    assert encodable(text) == expected


def test_what_services_answer_can_be_written():
    assert completion(text="x\ud83d").text == "x\ufffd"
    score = Score(value=None, outcome=Outcome.ERROR, detail="\ud83d!", bug="\udc00")
    assert (score.detail, score.bug) == ("\ufffd!", "\ufffd")
