"""The coefficient of the entropy bonus, constant or adapted to the entropy."""

import math

import pytest

from lit_grpo.objective import EntropyTerm
from lit_grpo.objective.entropy import EntropyControl


def test_the_entropy_coefficient_is_constant_without_a_target():
    control = EntropyControl(term=EntropyTerm(coef=0.3), coef=0.3)
    assert control.after_step(0.1) is control
    assert control.applied_coef == 0.3


def test_the_entropy_coefficient_rises_up_to_the_target_and_falls_above_within_its_bounds():
    term = EntropyTerm(coef=0.2, target=1.0, coef_step=0.2, coef_min=0.1, coef_max=0.5)
    control = EntropyControl(term=term, coef=0.2)
    assert control.applied_coef == 0  # before the first entropy is known
    coefs, applied = [], []
    for entropy in (1.0, 0.5, 0.9, 1.1, 2.0, 2.0):
        control = control.after_step(entropy)
        coefs.append(control.coef)
        applied.append(control.applied_coef)
    assert coefs == pytest.approx([0.4, 0.5, 0.5, 0.3, 0.1, 0.1])
    assert applied == pytest.approx([0.4, 0.5, 0.5, 0, 0, 0])


def test_before_the_first_step_the_entropy_counts_as_above_every_target():
    assert EntropyControl(term=EntropyTerm(target=5.0), coef=0.0).last_entropy == math.inf
