"""Rewards that failed are told with their exit code; bugs with their row and line."""

import pytest
import tiny
from toy_rollouts import completion, failed, rollouts

from lit_grpo.cli.rewards.failures import (
    REWARD_FAILED,
    failed_everywhere,
    failed_in_all,
    find_unreported,
    report_failures,
)
from lit_grpo.types import Outcome, Score

DOWN = failed(Outcome.ERROR, "ConnectionError: the service is gone")
BUG = Score(value=None, outcome=Outcome.ERROR, detail="KeyError: 'a'", bug="Row 0: line 7")


@pytest.mark.parametrize(
    ("scores", "fails"),
    [
        ([[DOWN, DOWN]], True),
        ([[DOWN, None]], True),  # of the one that it did not abstain from
        ([[None, None]], False),
        ([[DOWN, 1.0]], False),
    ],
)
def test_a_reward_failed_everywhere_if_it_gave_no_value_and_did_not_only_abstain(scores, fails):
    assert [one.reward for one in failed_everywhere(rollouts(scores))] == ["math"] * fails


def test_a_reward_must_fail_in_all_batches(capsys):
    down, up = rollouts([[DOWN, DOWN]]), rollouts([[DOWN, 1.0]])
    assert failed_in_all([down, up]) == failed_in_all([up, down]) == []
    assert [one.reward for one in failed_in_all([down, down])] == ["math"]
    assert report_failures([down, up]) == 0
    assert capsys.readouterr().err == ""


def test_the_error_names_the_reward_and_why_it_failed(capsys):
    assert report_failures([rollouts([[DOWN, DOWN]])]) == REWARD_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a reward failed on every completion: 100% of the scores of")
    assert (
        "reward 'math' ended as error, for instance: ConnectionError: the service is gone" in line
    )


def test_a_bug_is_shown_once_with_the_share_of_the_rows_that_were_asked(capsys):
    other = tiny.rollouts(
        [[1.0, 1.0]], [[completion(), completion()]], parts={"math": [[Score(value=1.0), BUG]]}
    )
    assert report_failures([other]) == 0
    (first, *_, last) = capsys.readouterr().err.splitlines()
    assert first.startswith("reward 'math' has a bug on 50% of the rows. Row p0 with the columns")
    assert last == "Row 0: line 7"
    assert report_failures([rollouts([[BUG, BUG]])]) == REWARD_FAILED
    assert capsys.readouterr().err.endswith("every completion: 'math', see above.\n")


def test_what_is_told_besides_bugs_is_why_most_rows_lack_a_value():
    assert find_unreported(rollouts([[BUG, 1.0]])) is None
    failure = find_unreported(rollouts([[BUG, BUG, DOWN, 1.0]]))
    assert (failure.reward, failure.fraction) == ("math", 0.25)
