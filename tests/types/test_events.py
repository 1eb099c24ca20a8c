import pytest

from lit_grpo.types import RunningStage, StageProgress, StopReason, UserError


def test_progress_advances_by_completions_and_leaves_the_other_counts():
    before = StageProgress(num_done=3, total=8, num_tokens=50)
    assert before.advanced(2) == StageProgress(num_done=5, total=8, num_tokens=50)
    assert before.num_done == 3


def test_a_stage_that_counts_nothing_shows_no_progress():
    assert RunningStage(name="update", started=1.5).progress() == StageProgress()


def test_a_stop_reason_is_printed_as_its_message():
    message = "Stopped because of a bug in reward 'mine':\nZeroDivisionError: division by zero"
    assert str(StopReason(exit_code=1, message=message)) == message


@pytest.mark.parametrize("exit_code", [-1, 256, 300, "20"])
def test_a_stop_has_an_exit_code_that_a_process_can_have(exit_code):
    with pytest.raises(UserError, match=r"exit_code must be .*, got '?-?\d+"):
        StopReason(exit_code=exit_code, message="enough")
