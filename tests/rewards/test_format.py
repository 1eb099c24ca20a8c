import pytest
from tiny import completion, prompt

from lit_grpo.rewards import FormatReward

THINK = r"(?s)<think>.*</think>\s*\d+"


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        ("full", "<think>a\nb</think>\n7", 1.0),
        ("full", "so <think>a</think>7", 0.0),
        ("full", "<think>a</think>7 it is", 0.0),
        ("search", "so <think>a</think>7 it is", 1.0),
        ("search", "7", 0.0),
    ],
)
def test_mode_decides_how_much_of_the_text_must_match(mode, text, expected):
    assert FormatReward(THINK, mode=mode).score(prompt(), completion(text=text)) == expected


def test_values_of_match_and_mismatch_can_be_set():
    reward = FormatReward(r"\d+", match=0.5, mismatch=-2.0)
    assert reward.score(prompt(), completion(text="12")) == 0.5
    assert reward.score(prompt(), completion(text="12 ")) == -2.0


def test_pattern_that_does_not_compile_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"got '\(a' \(missing \), unterminated subpattern"):
        FormatReward("(a")


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be full or search, got 'match'"):
        FormatReward("a", mode="match")
