"""A run ends between two steps, after a validation, or while a step waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lit_grpo.runs.safe_points import StopAtSafePoints, is_between_steps, stop_safely
from lit_grpo.stopping import get_stop_reason


def trainer_at(
    batch: int = 0,
    *,
    accumulate: int = 1,
    is_last: bool = False,
    finished: int = 1,
    fn: str = "fit",
    is_sanity_check: bool = False,
) -> SimpleNamespace:
    """A trainer in a batch, which has begun one after those that are finished."""
    total = SimpleNamespace(processed=finished, ready=finished)
    progress = SimpleNamespace(total=total)
    return SimpleNamespace(
        fit_loop=SimpleNamespace(
            batch_idx=batch, epoch_loop=SimpleNamespace(batch_progress=progress)
        ),
        accumulate_grad_batches=accumulate,
        is_last_batch=is_last,
        state=SimpleNamespace(fn=fn),
        sanity_checking=is_sanity_check,
        is_global_zero=True,
        default_root_dir="run",
        should_stop=False,
        limit_val_batches=1.0,
    )


@pytest.mark.parametrize(
    ("batch", "is_last", "expected"),
    [(0, False, False), (1, False, False), (2, False, True), (3, False, False), (3, True, True)],
)
def test_gradients_that_are_accumulated_end_at_every_third_batch_and_the_last(
    batch, is_last, expected
):
    assert is_between_steps(trainer_at(batch, accumulate=3, is_last=is_last)) == expected


class Asked(StopAtSafePoints):
    """Count how often it is asked whether to stop."""

    num_asked = 0

    def stop_if_due(self, trainer):
        self.num_asked += 1


@pytest.mark.parametrize(
    ("where", "num_asked"),
    [
        ({}, 3),
        ({"accumulate": 2}, 1),  # only while it waits
        ({"fn": "validate"}, 2),
        ({"is_sanity_check": True}, 2),
    ],
)
def test_it_is_asked_after_a_step_after_a_validation_and_while_a_step_waits(where, num_asked):
    asked, trainer = Asked(), trainer_at(**where)
    asked.on_train_batch_end(trainer, None, None, None, 0)
    asked.on_validation_end(trainer, None)
    asked.on_wait(trainer, None, None)
    assert asked.num_asked == num_asked


@pytest.mark.parametrize(
    ("finished", "words"), [(0, "0 rollout steps"), (1, "1 rollout step"), (2, "2 rollout steps")]
)
def test_a_stop_names_the_finished_steps(finished, words):
    trainer = trainer_at(finished=finished)
    stop_safely(trainer, 143, "Ended after {steps}.")
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, reason.message) == (143, f"Ended after {words}.")
    assert not reason.is_step_unfinished
    assert trainer.should_stop


def test_a_stop_within_a_step_leaves_it_undone():
    trainer = trainer_at(finished=2)
    trainer.fit_loop.epoch_loop.batch_progress.total.ready = 3
    stop_safely(trainer, 143, "Ended after {steps}.")
    reason = get_stop_reason(trainer)
    assert reason.is_step_unfinished
    assert reason.message == "Ended after 2 rollout steps."
