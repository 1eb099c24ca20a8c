from lit_grpo.types import RunningStage, StageProgress


def test_progress_advances_by_completions_and_leaves_the_other_counts():
    before = StageProgress(num_done=3, total=8, num_tokens=50)
    assert before.advanced(2) == StageProgress(num_done=5, total=8, num_tokens=50)
    assert before.num_done == 3


def test_a_stage_that_counts_nothing_shows_no_progress():
    assert RunningStage(name="update", started=1.5).progress() == StageProgress()
