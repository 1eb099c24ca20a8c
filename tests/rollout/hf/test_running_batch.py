"""The running rows of a wave against forward passes of whole texts."""

import pytest
import torch
from tiny import tiny_policy

from lit_grpo.rollout.hf.running_batch import RunningBatch
from lit_grpo.types.errors import Diverged

IDS = torch.tensor([[0, 0, 7, 8], [1, 2, 3, 4]])
"""Two prompts, of two and four tokens, padded on the left."""
PROMPTS = [[7, 8], [1, 2, 3, 4]]


@pytest.fixture(scope="module")
def model():
    return tiny_policy().model.eval()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def make_batch(model, *, shares_prompts: bool = False) -> RunningBatch:
    """Return two rows of each prompt."""
    noise = torch.arange(4.0)[:, None].expand(4, 3)
    return RunningBatch(model, IDS, IDS > 0, 2, noise, shares_prompts=shares_prompts)


def next_logits(model, *texts: list[int]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_rows_of_a_group_begin_with_the_logits_of_its_prompt(model):
    batch = make_batch(model)
    first, second = PROMPTS
    assert_close(batch.logits, next_logits(model, first, first, second, second))
    assert batch.rows == [0, 1, 2, 3]
    assert batch.sampled == [([], [])] * 4


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_logits_are_those_of_prompt_and_tokens_also_after_rows_have_ended(model, shares_prompts):
    batch = make_batch(model, shares_prompts=shares_prompts)
    first, second = PROMPTS
    batch.advance(torch.tensor([10, 11, 12, 13]), None)
    assert_close(
        batch.logits, next_logits(model, [*first, 10], [*first, 11], [*second, 12], [*second, 13])
    )
    batch.advance(torch.tensor([20, 21, 22, 23]), torch.tensor([False, True, True, False]))
    assert sorted(batch.rows) == [1, 2]
    texts = {1: [*first, 11, 21], 2: [*second, 12, 22]}
    assert_close(batch.logits, next_logits(model, *(texts[row] for row in batch.rows)))
    assert batch.noise[:, 0].tolist() == batch.rows


def test_tokens_are_kept_by_the_row_of_the_wave(model):
    batch = make_batch(model)
    stops = batch.append(
        torch.tensor([10, 11, 12, 13]),
        torch.tensor([-0.5, -1.0, -1.5, -2.0]),
        torch.tensor([True, False, False, True]),
    )
    assert stops == [True, False, False, True]
    batch.advance(torch.tensor([10, 11, 12, 13]), torch.tensor([False, True, True, False]))
    tokens = torch.tensor([20 + row for row in batch.rows])
    batch.append(tokens, torch.tensor([-0.25, -0.25]), torch.tensor([False, False]))
    assert batch.sampled == [
        ([10], [-0.5]),
        ([11, 21], [-1.0, -0.25]),
        ([12, 22], [-1.5, -0.25]),
        ([13], [-2.0]),
    ]


@pytest.mark.parametrize("logprob", [float("nan"), -float("inf")])
def test_a_logprob_that_is_not_finite_means_that_the_policy_has_diverged(model, logprob):
    batch = make_batch(model)
    logprobs = torch.tensor([-0.5, logprob, -0.5, -0.5])
    with pytest.raises(Diverged, match="logits are not finite while sampling"):
        batch.append(torch.ones(4), logprobs, torch.zeros(4))
    assert batch.sampled == [([], [])] * 4
