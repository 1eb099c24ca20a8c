"""When a cause of trouble is told, and when its warning becomes an alert."""

from __future__ import annotations

import logging

import pytest
from toy_rollouts import fit, outputs, rollouts, train_batch

from lit_grpo.callbacks import HealthMonitor, Rule
from lit_grpo.runs.files.events import EventsFile, read_events
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.types import UserError


def step_with(*rewards):
    """Return a step with a group of these rewards; equal ones have advantages of 0."""
    differ = len({*rewards}) > 1
    return outputs(rollouts([list(rewards)]), train_batch([-1.0, 1.0] if differ else [0.0, 0.0]))


HEALTHY, EQUAL = step_with(-1.0, 1.0), step_with(0.5, 0.5)
SOLVED, FAILED = step_with(1.0, 1.0), step_with(-1.0, -1.0)


@pytest.fixture
def told(tmp_path, caplog):
    """Run steps, and return the kind, the step and the cause of what is told of them."""

    def run(steps, monitor=None):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="lit_grpo"):
            callbacks = [monitor or HealthMonitor(), EventsFile(tmp_path)]
            fit(lambda step: steps[step], callbacks, steps=len(steps))
        events = [one for one in read_events(tmp_path) if one.kind in ("warning", "alert")]
        messages = [record.getMessage() for record in caplog.records]
        assert all(event.message in one for event, one in zip(events, messages, strict=True))
        return [(one.kind, one.step, one.cause) for one in events]

    return run


def test_a_reward_that_is_the_same_for_all_is_a_warning_at_once_and_an_alert_after_ten(
    told, caplog
):
    assert told([EQUAL] * 12) == [("warning", 1, "equal_rewards"), ("alert", 10, "equal_rewards")]
    _, alert = (record.getMessage() for record in caplog.records)
    assert alert.startswith("rollout step 10: All advantages are 0")
    assert alert.endswith("Rollout steps in a row like this one: 10.")


def test_nine_steps_in_a_row_are_no_alert(told):
    assert told([*[EQUAL] * 9, HEALTHY, *[EQUAL] * 9]) == [("warning", 1, "equal_rewards")]


def test_a_run_on_which_every_group_fails_is_told_so(told, caplog):
    assert told([HEALTHY, *[FAILED] * 10]) == [
        ("warning", 6, "unsolved"),
        ("alert", 11, "unsolved"),
    ]
    first = caplog.records[0].getMessage()
    assert "All groups fail: every reward is -1, the worst so far" in first


def test_a_run_that_has_solved_its_prompts_stays_solved_beyond_the_steps_that_are_remembered(told):
    assert told([HEALTHY, *[SOLVED] * 70]) == [
        ("warning", 6, "solved"),
        ("alert", 11, "solved"),
        ("alert", 55, "solved"),  # the 50th with a message due
    ]


def test_a_step_without_advantages_on_what_is_left_to_train_on_becomes_an_alert(told):
    filtered = outputs(
        rollouts([[0.0, 0.0, 1.0]]), train_batch([0.0, 0.0, 1.0], trained=[True, True, False])
    )
    assert told([filtered] * 10) == [("warning", 1, "no_advantage"), ("alert", 10, "no_advantage")]


def test_a_rule_ends_a_run_on_which_every_group_fails_as_one_without_a_reward(tmp_path):
    monitor = HealthMonitor({"unsolved": Rule(patience=3, action="stop")})
    trainer = fit(lambda step: FAILED if step else HEALTHY, [monitor], steps=20)
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.cause) == (ExitCode.NO_REWARD, "unsolved")
    assert trainer.global_step == 4
    assert monitor.trouble == "all groups fail"


def test_a_streak_goes_on_over_a_resume_and_so_does_the_range_of_rewards(told):
    monitor, again = HealthMonitor(), HealthMonitor()
    fit(lambda step: HEALTHY if step == 0 else FAILED, [monitor], steps=7)
    again.load_state_dict(monitor.state_dict())
    assert again.state_dict() == monitor.state_dict()
    assert told([FAILED] * 4, again) == [("alert", 4, "unsolved")]


def test_a_checkpoint_of_an_earlier_version_has_no_range_of_rewards(told):
    monitor, again = HealthMonitor(), HealthMonitor()
    state = monitor.state_dict()
    del state["reward_range"]
    again.load_state_dict(state)
    assert told([HEALTHY, *[FAILED] * 5], again) == [("warning", 6, "unsolved")]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(alert_after=2), [("warning", 1), ("alert", 2)]),
        (Rule(patience=3, alert_after=3), [("alert", 3)]),
        (Rule(patience=11), [("alert", 11)]),  # beyond the cause's own 10
        (Rule(action="alert"), [("alert", 1)]),
        (Rule(action="ignore"), []),
    ],
    ids=str,
)
def test_a_rule_says_when_there_is_an_alert(told, rule, expected):
    events = told([EQUAL] * 12, HealthMonitor({"equal_rewards": rule}))
    assert [event[:2] for event in events] == expected


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rule(alert_after=0), "equal_rewards.alert_after must be >= 1, got 0"),
        (
            Rule(patience=5, alert_after=4),
            "equal_rewards.alert_after must be >= 5, got 4 (the warning must come before)",
        ),
        (
            Rule(action="stop", alert_after=4),
            "equal_rewards.alert_after must be null with action stop, got 4",
        ),
    ],
    ids=str,
)
def test_an_alert_that_would_not_come_is_refused(rule, words):
    with pytest.raises(UserError) as caught:
        HealthMonitor({"equal_rewards": rule})
    assert words in str(caught.value)
