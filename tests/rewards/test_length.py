import pytest
from tiny import completion, prompt

from lit_grpo.rewards import LengthReward


def value(reward, length):
    return reward.score(prompt(), completion([7] * length))


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (40, -1.0)]
)
def test_soft_overlong_punishment_of_dapo(length, expected):
    # L_max = 16, L_cache = 4: ((16 - 4) - |y|) / 4 between 12 and 16.
    assert value(LengthReward(start_tokens=12, end_tokens=16), length) == expected


@pytest.mark.parametrize(("length", "expected"), [(2, 1.0), (4, 2.0), (6, 3.0), (9, 3.0)])
def test_ramp_may_rise(length, expected):
    assert value(LengthReward(2, 6, start_value=1.0, end_value=3.0), length) == expected


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (5, 5, "end_tokens must be > 5, got 5"),
        (6, 5, "end_tokens must be > 6, got 5"),
        (-1, 5, "start_tokens must be >= 0, got -1"),
    ],
)
def test_ramp_without_room_is_refused(start, end, message):
    with pytest.raises(ValueError, match=message):
        LengthReward(start, end)
