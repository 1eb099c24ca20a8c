from __future__ import annotations

import logging
import re

import pytest
from toy_rollouts import completion, failed, fit, outputs, rollouts

from lit_grpo.callbacks import ZeroRewardBreaker
from lit_grpo.stopping import ExitCode, get_stop_reason, how_it_ended, warnings_at_end
from lit_grpo.types import Outcome

ZERO = rollouts([[0.0, 0.0]])
GOOD = rollouts([[0.0, 1.0]])


def run(breaker, batches, **options):
    """Train on batches, and return the trainer of a run that may do no further step."""
    steps = options.pop("steps", len(batches))
    return fit(lambda step: outputs(batches[step]), [breaker], steps=steps, **options)


def stopped(breaker, batches, **options):
    """Train on batches, and return the trainer of a run that was stopped before its last step."""
    trainer = run(breaker, batches, steps=len(batches) + 1, **options)
    assert trainer.global_step == len(batches)
    return trainer


def test_the_run_stops_after_a_streak_of_zero_steps_with_exit_code_3():
    breaker = ZeroRewardBreaker(alert_after=2, stop_after=3)
    trainer = run(breaker, [GOOD, ZERO, ZERO, ZERO, ZERO])
    reason = get_stop_reason(trainer)
    assert trainer.global_step == 4
    assert reason.exit_code == ExitCode.NO_REWARD == 3
    assert "3 rollout steps in a row, since rollout step 2" in reason.message
    assert "in all of them every valid reward was exactly 0" in reason.message
    assert "could be scored" not in reason.message


def test_one_reward_that_is_not_zero_ends_the_streak():
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    trainer = run(breaker, [ZERO, GOOD, ZERO, GOOD])
    assert get_stop_reason(trainer) is None
    assert trainer.global_step == 4


def test_a_negative_reward_is_a_reward():
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=1)
    assert get_stop_reason(run(breaker, [rollouts([[0.0, -1.0]])])) is None


def test_a_zero_reward_of_an_invalid_row_does_not_hide_the_streak():
    nothing_valid = rollouts([[None, None]])
    trainer = stopped(ZeroRewardBreaker(alert_after=1, stop_after=2), [ZERO, nothing_valid])
    message = get_stop_reason(trainer).message
    assert "in 1 of them every valid reward was exactly 0" in message
    assert "in 1 of them no completion could be scored" in message


def test_the_alert_is_logged_once_and_names_the_stop(caplog):
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        run(ZeroRewardBreaker(alert_after=2, stop_after=9), [ZERO] * 4)
    (record,) = caplog.records
    assert "No reward for 2 rollout steps in a row" in record.getMessage()
    assert "stopped after 9 such steps" in record.getMessage()


def stop_message(batch):
    return get_stop_reason(stopped(ZeroRewardBreaker(1, 1), [batch])).message


def test_an_outage_is_named_with_its_reward_and_a_sample():
    down = failed(Outcome.TIMEOUT, "no answer from https://judge.example within 30 s")
    batch = rollouts([[down, down], [down, failed(Outcome.PARSE_ERROR)]])
    reason = get_stop_reason(stopped(ZeroRewardBreaker(1, 1), [batch]))
    assert (reason.exit_code, reason.cause) == (ExitCode.NO_REWARD, "nothing_scored")
    message = reason.message
    assert "75% of the scores of reward 'math' ended as timeout" in message
    assert "no answer from https://judge.example within 30 s" in message
    assert "service" in message


def test_groups_whose_weights_are_too_old_are_no_outage_and_their_truncation_is_no_cause():
    cut = [completion(f"{n} and then", "length") for n in range(4)]
    stale = rollouts([[0.0, 1.0], [1.0, 0.0]], cut).without_stale([True, True])
    trainer = stopped(ZeroRewardBreaker(alert_after=1, stop_after=2), [GOOD, stale, stale])
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.cause) == (ExitCode.NO_REWARD, "stale_rollouts")
    dropped = "in all of them groups were dropped because their weights were too old. Likely cause:"
    assert dropped in reason.message
    assert "- 100% of the groups were dropped: by the policy_versions of" in reason.message
    assert "raise model.max_head_offpolicyness" in reason.message
    assert not re.search("could be scored|outage|cut off|100% of the compl", reason.message)


def test_steps_whose_groups_are_too_old_are_told_from_those_without_rewards():
    stale = rollouts([[0.0, 1.0]]).without_stale([True])
    breaker, resumed = (ZeroRewardBreaker(alert_after=1, stop_after=3) for _ in range(2))
    run(breaker, [GOOD, ZERO, stale])
    resumed.load_state_dict(breaker.state_dict())
    reason = get_stop_reason(stopped(resumed, [rollouts([[None, None]])]))
    assert reason.cause == "no_reward"
    assert (
        "in 1 of them every valid reward was exactly 0, and in 1 of them groups were dropped "
        "because their weights were too old, and in 1 of them no completion could be scored. In "
        "the step before, 50% of the completions had a reward"
    ) in reason.message


def test_the_end_of_a_run_of_groups_that_are_too_old_says_what_to_do():
    stale = rollouts([[0.0, 1.0]]).without_stale([True])
    said = how_it_ended(run(ZeroRewardBreaker(alert_after=2, stop_after=9), [stale] * 2))
    assert "in any of the 2 rollout steps. With an engine of your own, set policy_versions" in said


def test_truncation_is_named_with_its_fraction():
    cut = [completion(f"{n} and then", "length") for n in range(3)] + [completion("7")]
    message = stop_message(rollouts([[0.0] * 4], cut))
    assert "75% of the completions were cut off" in message
    assert "model.sampling.max_tokens" in message


def test_identical_completions_are_named():
    message = stop_message(rollouts([[0.0] * 2], [completion("same"), completion("same")]))
    assert "all completions are identical" in message


def test_a_fall_to_nothing_with_one_text_in_each_group_is_a_collapse():
    same = rollouts([[0.0] * 2], [completion("aaa"), completion("aaa")])
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=1)
    message = get_stop_reason(stopped(breaker, [GOOD, same])).message
    assert "before, 50% of the completions had a reward; now all completions of a group" in message
    assert "the policy has collapsed. Go back to an earlier checkpoint" in message
    assert "outage" not in message
    resumed = ZeroRewardBreaker(alert_after=1)
    resumed.load_state_dict(breaker.state_dict())
    assert "the policy has collapsed" in resumed.warning_at_end


def test_a_fall_to_nothing_with_empty_or_unlike_completions_is_an_outage():
    for texts in (["", ""], ["7", "8"]):
        fallen = rollouts([[0.0] * 2], [completion(text) for text in texts])
        breaker = ZeroRewardBreaker(alert_after=1, stop_after=1)
        assert "points to an outage" in get_stop_reason(stopped(breaker, [GOOD, fallen])).message


def test_empty_completions_point_at_the_engine():
    message = stop_message(rollouts([[0.0] * 2], [completion(""), completion(" ")]))
    assert "100% of the completions are empty" in message
    assert "engine" in message


def test_otherwise_the_format_never_matched_and_a_sample_is_shown():
    message = stop_message(rollouts([[0.0] * 2], [completion("it is 8"), completion("9")]))
    assert "no completion has the format or answer" in message
    assert "'it is 8'" in message
    assert "'2'" in message  # the gold answer


def rewarded(share: float):
    """A step of ten completions of which this share has a reward."""
    count = round(10 * share)
    return rollouts([[1.0] * count + [0.0] * (10 - count)])


@pytest.mark.parametrize(
    ("before", "what"),
    [
        ([], "No step before it had a reward."),
        ([0.7, 0.6, 0.7], "In the step before, 70% of the completions had a reward: a fall to"),
        (
            [0.8, 0.6, 0.3, 0.1],
            "fell from 80% to 10% over 4 steps before: the policy has collapsed",
        ),
        ([0.2, 0.9, 0.4], "fell from 90% to 40% over 2 steps before: the policy has collapsed"),
    ],
)
def test_an_outage_is_told_from_a_collapse(before, what):
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    trainer = stopped(breaker, [*map(rewarded, before), ZERO, ZERO])
    assert what in get_stop_reason(trainer).message


def test_three_completions_are_shown_with_their_scores():
    groups = rollouts([[0.0, 0.0]] * 6)
    reason = get_stop_reason(stopped(ZeroRewardBreaker(alert_after=1, stop_after=1), [groups]))
    lines = reason.message.splitlines()
    shown = lines[lines.index("Completions of this step:") + 1 :][:4]
    assert [line.startswith("- prompt ") for line in shown] == [True, True, True, False]
    assert all("'answer " in line and line.endswith("(math 0)") for line in shown[:3])
    assert len(set(shown)) == 4


def test_what_was_before_survives_a_checkpoint():
    breaker, resumed = ZeroRewardBreaker(), ZeroRewardBreaker(alert_after=1, stop_after=1)
    run(breaker, [GOOD])
    resumed.load_state_dict(breaker.state_dict())
    message = get_stop_reason(stopped(resumed, [ZERO])).message
    assert "In the step before, 50% of the completions had a reward" in message


def test_the_streak_survives_a_checkpoint():
    breaker = ZeroRewardBreaker(alert_after=2, stop_after=3)
    run(breaker, [ZERO, ZERO])
    resumed = ZeroRewardBreaker(alert_after=2, stop_after=3)
    resumed.load_state_dict(breaker.state_dict())
    message = get_stop_reason(stopped(resumed, [rollouts([[None, None]])])).message
    assert "3 rollout steps in a row, since rollout step 1" in message
    assert (
        "in 2 of them every valid reward was exactly 0, and in 1 of them no completion" in message
    )


def test_a_resumed_run_gets_as_many_steps_again(caplog):
    settings = {"alert_after": 2, "stop_after": 3}
    breaker, resumed = ZeroRewardBreaker(**settings), ZeroRewardBreaker(**settings)
    stopped(breaker, [ZERO] * 3)
    resumed.load_state_dict(breaker.state_dict())
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        message = get_stop_reason(stopped(resumed, [ZERO] * 3)).message
    assert "6 rollout steps in a row, since rollout step 1" in message
    (alert,) = (record.getMessage() for record in caplog.records)
    assert "No reward for 5 rollout steps in a row" in alert
    assert "stopped after 6 such steps" in alert


def test_a_stopped_run_does_not_validate_once_more():
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    trainer = run(breaker, [ZERO, ZERO, ZERO], validate_every=3)
    assert "val/accuracy" not in trainer.callback_metrics


@pytest.mark.parametrize(
    "limits", [{}, {"steps": -1, "max_epochs": 2, "num_batches": 2}], ids=["max_steps", "epochs"]
)
def test_a_streak_that_ends_with_the_last_step_stops_nothing_and_is_said_of_the_end(caplog, limits):
    breaker = ZeroRewardBreaker(alert_after=2, stop_after=4)
    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        trainer = run(breaker, [ZERO] * 4, **limits)
    assert trainer.global_step == 4
    assert get_stop_reason(trainer) is None
    early, last = (record.getMessage() for record in caplog.records)
    assert early.endswith("after 4 such steps, unless it has done all its steps by then.")
    assert "No reward for 4 rollout steps in a row" in last
    assert "will be stopped" not in last
    assert ". No reward was earned in any of the 4 rollout steps. Read ten" in how_it_ended(trainer)


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        ([ZERO], "in the only rollout step"),
        ([ZERO, ZERO], "in any of the 2 rollout steps"),
        ([GOOD, ZERO, ZERO], "in the last 2 rollout steps"),
        ([GOOD, ZERO], ""),
        ([ZERO, ZERO, GOOD], ""),
    ],
)
def test_the_end_says_that_no_step_or_none_of_the_last_had_a_reward(batches, what):
    trainer = run(ZeroRewardBreaker(alert_after=2, stop_after=9), batches)
    assert (f"No reward was earned {what}." in how_it_ended(trainer)) == bool(what)
    assert warnings_at_end(trainer) or not what
    has_fallen = what == "in the last 2 rollout steps"
    assert ("a fall to nothing" in how_it_ended(trainer)) == has_fallen


def test_a_module_without_rollouts_is_not_stopped():
    trainer = fit(lambda step: {}, [ZeroRewardBreaker(1, 1)], steps=2)
    assert get_stop_reason(trainer) is None


@pytest.mark.parametrize("alert_after", [0, 11])
def test_an_alert_after_the_stop_or_at_once_is_refused(alert_after):
    with pytest.raises(ValueError, match=f"alert_after must be from 1 to 10, got {alert_after}"):
        ZeroRewardBreaker(alert_after, stop_after=10)


def test_a_streak_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="stop_after must be >= 1, got 0"):
        ZeroRewardBreaker(1, stop_after=0)


TWO_RANKS = """
import os
import sys
from toy_rollouts import fit, outputs, rollouts
from lit_grpo.callbacks import ZeroRewardBreaker
from lit_grpo.stopping import get_stop_reason

rank = int(os.environ.get("LOCAL_RANK", 0))

def step(number):
    return outputs(rollouts([[0.0, 1.0 if rank == 1 and number == 1 else 0.0]]))

breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
trainer = fit(step, [breaker], steps=9, strategy="ddp", devices=2)
reason = get_stop_reason(trainer)
sys.stdout.write(f"rank {rank} steps {trainer.global_step} code {reason.exit_code}\\n")
"""


@pytest.mark.slow
def test_a_reward_on_one_rank_ends_the_streak_of_all(tmp_path, importer):
    (tmp_path / "run.py").write_text(TWO_RANKS)
    importer.run(["2", "run.py"], tmp_path, program="forked_program")
    said = (tmp_path / "said.txt").read_text().splitlines()
    assert sorted(line for line in said if line.startswith("rank")) == [
        "rank 0 steps 4 code 3",
        "rank 1 steps 4 code 3",
    ]
