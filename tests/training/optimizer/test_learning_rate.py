"""The schedule of the learning rate, and the factor of a phase on top of it."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from lit_grpo.training.optimizer.learning_rate import build_schedule, scale_learning_rate


class Phases:
    def lr_scale(self, step):
        return 0.5 if step < 2 else 0.1


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)


def make_schedule(data) -> LambdaLR:
    schedule = LambdaLR(make_optimizer(), lambda step: 1 / 2**step)
    scale_learning_rate(schedule, data)
    return schedule


def rates(schedule: LambdaLR, number: int) -> list[float]:
    found = []
    for _ in range(number):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]),
        ("linear", [0.0, 4.0, 8.0, 6.0, 4.0, 2.0, 0.0]),
        ("cosine", [0.0, 4.0, 8.0, 4 + 2 * 2**0.5, 4.0, 4 - 2 * 2**0.5, 0.0]),
    ],
)
def test_the_rate_warms_up_and_decays_by_the_end_of_the_run(name, expected):
    schedule = build_schedule(make_optimizer(), name, warmup_steps=2, num_steps=lambda: 6)
    assert rates(schedule, 7) == pytest.approx(expected)


def test_a_constant_rate_needs_no_end_of_the_run():
    build_schedule(make_optimizer(), "constant", warmup_steps=2, num_steps=lambda: 1 // 0)


def test_the_factor_changes_at_the_boundary():
    assert rates(make_schedule(Phases()), 4) == pytest.approx([4.0, 2.0, 0.2, 0.1])
    assert make_schedule(Phases()).get_last_lr() == [4.0]


def test_data_without_phases_leaves_the_schedule_as_it_is():
    assert rates(make_schedule(object()), 3) == [8.0, 4.0, 2.0]
    assert rates(make_schedule(None), 3) == [8.0, 4.0, 2.0]


def test_a_checkpoint_keeps_no_factor_so_that_the_present_phases_apply():
    class Higher:
        def lr_scale(self, step):
            return 2.0

    earlier = make_schedule(Phases())
    rates(earlier, 1)
    resumed = make_schedule(Higher())
    resumed.load_state_dict(earlier.state_dict())
    resumed.optimizer.step()
    resumed.step()
    assert resumed.get_last_lr() == [8.0 * 2.0 / 4]
