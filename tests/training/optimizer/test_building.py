from functools import partial

import pytest
import torch
from torch.optim import AdamW

from lit_grpo.training.optimizer.building import built_by, check_function
from lit_grpo.types import UserError

OTHER = torch.nn.Parameter(torch.ones(2))
PARAMETERS = [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(AdamW, learning_rate=1e-5), "argument 'learning_rate'; did you mean lr?)."),
        (partial(AdamW, weight_decy=0), "argument 'weight_decy'; did you mean weight_decay?)."),
        (partial(AdamW, xyzzy=0), "argument 'xyzzy')."),
        (partial(AdamW, lr="1e-5"), "; are all of its settings numbers?)."),
        (partial(AdamW, lr=-1.0), "(Invalid learning rate: -1.0)."),
        (lambda parameters: None, "got one that returns None (its return is missing?)."),
        (lambda parameters: 5, "got one that returns 5."),
        (
            lambda parameters: AdamW([OTHER]),
            "got AdamW of other parameters (the policy would never change).",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_made_says_why_and_what_to_set(make, message):
    with pytest.raises(UserError) as raised:
        built_by(make, PARAMETERS)
    assert str(raised.value).endswith(f"{message} Set model.optimizer.")


def test_an_optimizer_is_made_of_the_parameters():
    optimizer = built_by(partial(AdamW, lr=0.5), PARAMETERS)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["params"]) == (
        0.5,
        PARAMETERS,
    )


def test_an_optimizer_in_place_of_a_function_is_refused():
    check_function(AdamW)
    with pytest.raises(UserError, match=r"model.optimizer\.$"):
        check_function(AdamW(PARAMETERS))
