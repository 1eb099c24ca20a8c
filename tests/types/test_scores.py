import math

import pytest

from lit_grpo.types import Outcome, Score


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_score_that_is_ok_needs_a_finite_value(value):
    with pytest.raises(ValueError, match=f"needs a finite value, got {value}"):
        Score(value=value)


def test_a_score_that_failed_must_have_no_value():
    with pytest.raises(ValueError, match=r"outcome timeout must have no value, got 0\.0"):
        Score(value=0.0, outcome=Outcome.TIMEOUT)


def test_only_failures_outside_the_completion_are_an_outage():
    scores = {outcome: Score(value=None, outcome=outcome) for outcome in Outcome if outcome != "ok"}
    failures = {outcome for outcome, score in scores.items() if score.is_failure}
    outages = {outcome for outcome, score in scores.items() if score.is_outage}
    assert scores.keys() - failures == {Outcome.ABSTAIN, Outcome.OTHER_SOURCE}
    assert failures - outages == {Outcome.TRUNCATED, Outcome.NOT_SAMPLED}
    assert not Score(value=1.0).is_failure
