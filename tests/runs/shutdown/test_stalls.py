"""What counts as progress, and what is reported of a run that makes none."""

from dataclasses import replace

import pytest

from lit_grpo.runs.shutdown.stalls import Snapshot, StallTracker
from lit_grpo.types import RunningStage, StageProgress

START = Snapshot(
    time=100.0,
    num_ended=3,
    stage=RunningStage(name="generation", started=99.0),
    progress=StageProgress(total=8),
    is_paused=False,
)


def watched(*changes_by_time: tuple[float, dict]) -> StallTracker:
    """Return a tracker that has seen the start, and then what has changed by each time."""
    tracker, snapshot = StallTracker(START), START
    for seconds, changes in changes_by_time:
        snapshot = replace(snapshot, time=100.0 + seconds, **changes)
        tracker.update(snapshot)
    return tracker


def tokens(number: int, num_done: int = 0) -> dict:
    return {"progress": StageProgress(total=8, num_done=num_done, num_tokens=number)}


def test_a_stage_whose_counts_do_not_advance_has_stalled_and_is_reported_ever_more_rarely():
    tracker = watched((10, tokens(5)), (40, {}))
    assert tracker.quiet_seconds == 30
    assert not tracker.is_stall_due(30)
    assert tracker.is_stall_due(29)
    assert not tracker.is_stall_due(29)
    tracker.update(replace(tracker.snapshot, time=169.0))
    assert tracker.is_stall_due(29)


@pytest.mark.parametrize(
    "change",
    [
        tokens(6),
        tokens(5, num_done=1),
        {"num_ended": 4},
        {"stage": None},
        {"stage": RunningStage(name="generation", started=130.0)},
        {"is_paused": True},
    ],
    ids=["a token", "a completion", "an end", "no stage", "the next stage", "a pause"],
)
def test_any_advance_and_the_pause_of_an_outage_are_no_stall(change):
    tracker = watched((10, tokens(5)), (40, change), (50, {}))
    assert tracker.quiet_seconds == (0 if "is_paused" in change else 10)


def test_a_stage_that_advances_for_long_is_slow_and_its_end_is_estimated():
    tracker = watched((100, tokens(500)), (200, tokens(900)))
    assert not tracker.is_stall_due(150)
    assert tracker.is_slow_due(150)
    assert not tracker.is_slow_due(150)
    assert tracker.describe_slow("stage generation of rollout step 0", 1000) == (
        "Stage generation of rollout step 0 is slow but advances, for 0:03:20 now, at 0 of 8 "
        "completions and 900 tokens. It takes at most 0:26:17 more."
    )
    tracker.update(replace(tracker.snapshot, time=400.0, **tokens(2000, num_done=2)))
    assert tracker.describe_slow("it", 1000).endswith("It may take 0:15:00 more.")
