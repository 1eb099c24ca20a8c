"""The rates of a CPU, as they are measured."""

from __future__ import annotations

import time

from setups import SIZES

from lit_grpo.cli.estimate import calibration
from lit_grpo.cli.estimate.calibration import _products, shortest


def test_the_products_are_those_of_a_layer():
    _, flops = _products(SIZES, 3)
    # Queries and output, keys and values, and three of the feed-forward part: 20 inner values.
    assert flops == 2 * 3 * 8 * (2 * 8 + 2 * 8 + 3 * 20)


def test_functions_take_turns_and_slow_ones_take_fewer(monkeypatch):
    calls = []
    found = shortest(lambda: calls.append(1), lambda: calls.append(2), repeats=5)
    assert calls == 6 * [1, 2]  # once more than is timed
    assert len(found) == 2
    monkeypatch.setattr(calibration, "MOST_SECONDS", 0.01)
    calls.clear()
    shortest(lambda: calls.append(time.sleep(0.01)), repeats=50)
    assert len(calls) == calibration.FEWEST_REPEATS + 1
