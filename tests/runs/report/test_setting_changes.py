"""Which settings a model card says a run has changed, whatever ended the run in between."""

from __future__ import annotations

import pytest

from lit_grpo.runs.files.event_log import Event, append_event
from lit_grpo.runs.report.setting_changes import describe_changes

GROUP = "model.group_size: 2 -> 4"
RATE, TAKEN_BACK = "model.optimizer.lr: 0.1 -> 0.2", "model.optimizer.lr: 0.2 -> 0.1"
FURTHER = "model.optimizer.lr: 0.2 -> 0.4"
IN_EFFECT = "model.optimizer.lr 0.1 -> 0.2 after step 2"


def written(path, *events) -> str:
    for kind, step, *changes in events:
        event = Event(time="2026-01-01T00:00:00+00:00", step=step, kind=kind, changes=changes)
        append_event(path, event)
    return describe_changes(path)


START, RESUME, STOP = "start", "resume", "stop"


@pytest.mark.parametrize(
    ("events", "described"),
    [
        ([(RESUME, 2, RATE, "trainer.max_steps: 2 -> 3")], IN_EFFECT),
        ([(RESUME, 2, RATE), (RESUME, 2, RATE)], IN_EFFECT),  # killed, and repeated
        ([(RESUME, 2, RATE), (STOP, 2), (RESUME, 2)], IN_EFFECT),  # saved by the stop
        ([(RESUME, 2, RATE), (STOP, 2), (RESUME, 2, GROUP)], f"{IN_EFFECT}; {{group}}"),
        ([(RESUME, 2, RATE), (STOP, 2), (RESUME, 2, RATE)], IN_EFFECT),
        ([(RESUME, 2, RATE), (STOP, 2), (RESUME, 2, TAKEN_BACK)], ""),
        (
            [(RESUME, 2, RATE), (STOP, 2), (RESUME, 2, FURTHER)],
            "model.optimizer.lr 0.1 -> 0.4 after step 2",
        ),
        ([(RESUME, 2, RATE), (STOP, 4), (RESUME, 4)], IN_EFFECT),
        ([(RESUME, 2, RATE), (STOP, 4), (RESUME, 2)], ""),  # it went back to before the change
        ([(RESUME, 2, RATE), (RESUME, 5, GROUP), (STOP, 5), (RESUME, 3)], IN_EFFECT),
        ([(RESUME, 2, RATE), (STOP, 2), (START, 0)], ""),
    ],
)
def test_changes_in_effect_are_told_once(tmp_path, events, described):
    group = "model.group_size 2 -> 4 after step 2"
    assert written(tmp_path, (START, 0), *events) == described.format(group=group)
