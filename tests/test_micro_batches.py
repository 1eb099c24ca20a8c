import torch
from packs import batch_of

from lit_grpo.batching import micro_batches
from lit_grpo.packing import pack


def groups_of(lengths: list[list[int]], prompt: int) -> list:
    """For `batch_of`, of tokens that no two rows have in common."""
    numbers = iter(range(1, 10_000))

    def tokens(length: int) -> list[int]:
        return [next(numbers) for _ in range(length)]

    return [part for row in lengths for part in (tokens(prompt), list(map(tokens, row)))]


def test_packed_micro_batches_hold_every_row_once_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (12, 4), generator=generator).tolist()
    batch = batch_of(*groups_of(lengths, prompt=7))
    rows = (batch.advantages > -0.9).nonzero()[:, 0]
    parts = micro_batches(batch, rows, max_tokens=150)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    assert [pack(batch.select(part)).ids.shape[1] <= 150 for part in parts] == [True] * len(parts)


def test_a_group_stays_together_where_it_fits():
    batch = batch_of(*groups_of([[5, 5], [9, 1], [4, 4], [3, 3]], prompt=2))
    parts = micro_batches(batch, torch.arange(8), max_tokens=24)
    assert [part.tolist() for part in parts] == [[2, 3, 0, 1], [4, 5, 6, 7]]


def test_a_group_beyond_the_budget_is_parted_and_a_row_beyond_it_stands_alone():
    batch = batch_of(*groups_of([[50, 5, 5, 5]], prompt=4))
    parts = micro_batches(batch, torch.arange(4), max_tokens=14)
    assert [part.tolist() for part in parts] == [[0], [1, 2], [3]]


def test_no_rows_make_no_micro_batches():
    batch = batch_of(*groups_of([[1, 2]], prompt=2))
    for packed in (True, False):
        assert micro_batches(batch, torch.tensor([], dtype=torch.long), 10, packed=packed) == []


def test_padded_micro_batches_hold_as_many_rows_as_fit_when_all_are_as_long():
    batch = batch_of(*groups_of([[6, 1], [2, 2]], prompt=2))
    parts = micro_batches(batch, torch.arange(4), max_tokens=16, packed=False)
    assert [part.tolist() for part in parts] == [[0, 2], [3, 1]]
