"""States that objects return are readable for a resumed run, or refused by name."""

import io
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from lit_grpo.types import UserError
from lit_grpo.types.saved_state import saved_state


def test_numbers_of_numpy_become_plain_wherever_they_are_and_all_can_be_read():
    given = {
        "mean": np.float64(0.5),
        np.int64(3): [np.float32(2), (np.bool_(True), {np.int8(1)})],
        "kept": [None, True, 2, 0.25, 1j, "é", b"x", torch.ones(2), torch.float32],
        "counts": Counter(a=1),
        "ordered": OrderedDict(b=np.uint8(7)),
    }
    file = io.BytesIO()
    torch.save(saved_state("rewards.mine", given), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert torch.equal(read["kept"].pop(-2), torch.ones(2))
    assert repr(read) == repr(
        {
            "mean": 0.5,
            3: [2.0, (True, {1})],
            "kept": [None, True, 2, 0.25, 1j, "é", b"x", torch.float32],
            "counts": Counter(a=1),
            "ordered": OrderedDict(b=7),
        }
    )
    assert isinstance(given["mean"], np.float64)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (deque([0.5]), "collections.deque"),
        (np.zeros(2), "numpy.ndarray"),
        (defaultdict(int), "collections.defaultdict"),
        (lambda: 0, "builtins.function"),
        (np.datetime64("2026-11-28"), "datetime.date"),
        (np.longdouble(0.5), "numpy.longdouble"),
    ],
)
def test_a_value_that_torch_would_not_read_is_refused_by_its_place(value, said):
    with pytest.raises(
        UserError, match=rf"^rewards\.mine\.last\.1 must be a number.*got {said} \("
    ):
        saved_state("rewards.mine", {"last": [0, value]})
