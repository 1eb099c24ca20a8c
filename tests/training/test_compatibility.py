"""Strategies and precisions with which a run would be wrong."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

from lit_grpo.training.compatibility import refuse_unsupported


@pytest.mark.parametrize(
    ("strategy", "precision", "message"),
    [
        (SingleDeviceStrategy, "16-mixed", "got 16-mixed .* Set trainer.precision"),
        (FSDPStrategy, "32-true", "got FSDPStrategy .* Set trainer.strategy"),
    ],
)
def test_strategies_and_precisions_that_would_train_wrongly_are_refused(
    strategy, precision, message
):
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(SimpleNamespace(strategy=strategy(), precision=precision))
