import pytest
import torch

from lit_grpo.rollout.hf.compaction import Compaction

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stays", "rows"),
    [
        ([False, True, False, True, True], [3, 1, 4]),
        ([True, True, True, False], [0, 1, 2]),
        ([False, False, True], [2]),
        ([True, True], [0, 1]),
        ([False, False], []),
    ],
)
def test_the_last_rows_move_into_the_places_of_removed_ones(stays, rows):
    moves = Compaction(torch.tensor(stays), CPU)
    assert moves.num_rows == len(rows)
    assert moves.rows.tolist() == rows
    buffer = torch.arange(len(stays))[:, None] * torch.tensor([1, 10])
    moves.apply(buffer)
    assert buffer[: len(rows)].tolist() == [[row, 10 * row] for row in rows]


def test_a_buffer_may_have_more_rows_than_are_used():
    buffer = torch.tensor([5, 6, 7, 99])
    Compaction(torch.tensor([False, True, True]), CPU).apply(buffer)
    assert buffer[:2].tolist() == [7, 6]


def test_views_of_a_buffer_are_moved_in_place():
    buffer = torch.tensor([[1, 2, 3], [4, 5, 6]])
    Compaction(torch.tensor([False, True]), CPU).apply(buffer[:, :2])
    assert buffer.tolist() == [[4, 5, 3], [4, 5, 6]]
