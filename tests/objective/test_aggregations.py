"""The weight of each token in the loss under every aggregation."""

from dataclasses import replace

import pytest
import torch
from loss_batches import counts_of, train_batch

from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.inputs import TokenCounts

MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [[1 / 4] * 3, [1 / 4, 0, 0]]),
        ("sequence", [[1 / 6] * 3, [1 / 2, 0, 0]]),
        ("sequence_sum", [[1 / 2] * 3, [1 / 2, 0, 0]]),
        ("constant", [[1 / 10] * 3, [1 / 10, 0, 0]]),
    ],
)
def test_aggregations_weigh_tokens_as_in_their_papers(aggregation, expected):
    counts = replace(counts_of(train_batch([0.0] * 3, MASK)), max_tokens=5)
    weights = AGGREGATIONS[aggregation](MASK, counts)
    torch.testing.assert_close(weights, torch.tensor([*expected, [0, 0, 0]]))


def test_local_token_gives_each_of_two_ranks_half_of_the_weight():
    ranks = [train_batch([1.0, 1.0], [[1, 1], [1, 0]]), train_batch([1.0], [[1, 0]])]
    weigh = AGGREGATIONS["local_token"]
    here, there = (
        weigh(ranks[i].loss_mask, counts_of(ranks[i], ranks[1 - i])).flatten() for i in (0, 1)
    )
    assert here.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert there.tolist() == pytest.approx([1 / 2, 0])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_tokens_has_no_weights(aggregation):
    counts = TokenCounts(
        tokens=0, sequences=0, max_tokens=5, local_tokens=0, num_ranks=1, entropy_tokens=0
    )
    assert AGGREGATIONS[aggregation](torch.zeros(2, 3).bool(), counts).eq(0).all()
