"""What counts as progress, and what is reported of a run that makes none."""

from dataclasses import replace

import pytest

from lit_grpo.runs.stalls import Look, Watch
from lit_grpo.types import RunningStage, StageProgress

START = Look(
    time=100.0,
    num_ended=3,
    stage=RunningStage(name="generation", started=99.0),
    progress=StageProgress(total=8),
    is_paused=False,
)


def watched(*looks: tuple[float, dict]) -> Watch:
    """Return a watch that has seen the start, and then what has changed by each time."""
    watch, look = Watch(START), START
    for seconds, changes in looks:
        look = replace(look, time=100.0 + seconds, **changes)
        watch.take(look)
    return watch


def tokens(number: int, num_done: int = 0) -> dict:
    return {"progress": StageProgress(total=8, num_done=num_done, num_tokens=number)}


def test_a_stage_whose_counts_do_not_advance_has_stalled_and_is_reported_ever_more_rarely():
    watch = watched((10, tokens(5)), (40, {}))
    assert watch.quiet_seconds == 30
    assert not watch.is_stall_due(30)
    assert watch.is_stall_due(29)
    assert not watch.is_stall_due(29)
    watch.take(replace(watch.look, time=169.0))
    assert watch.is_stall_due(29)


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
    watch = watched((10, tokens(5)), (40, change), (50, {}))
    assert watch.quiet_seconds == (0 if "is_paused" in change else 10)


def test_a_stage_that_advances_for_long_is_slow_and_its_end_is_estimated():
    watch = watched((100, tokens(500)), (200, tokens(900)))
    assert not watch.is_stall_due(150)
    assert watch.is_slow_due(150)
    assert not watch.is_slow_due(150)
    assert watch.describe_slow("stage generation of rollout step 0", 1000) == (
        "Stage generation of rollout step 0 is slow but advances, for 0:03:20 now, at 0 of 8 "
        "completions and 900 tokens. It takes at most 0:26:17 more."
    )
    watch.take(replace(watch.look, time=400.0, **tokens(2000, num_done=2)))
    assert watch.describe_slow("it", 1000).endswith("It may take 0:15:00 more.")
