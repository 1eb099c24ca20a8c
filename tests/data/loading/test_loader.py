"""The order of prompts: seeded, shared by ranks, resumable at any batch."""

import pytest

from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.types import Prompt, UserError


def prompts(number: int) -> list[Prompt]:
    return [Prompt(id=str(i), text="x", token_ids=(1,)) for i in range(number)]


def loader(number: int, batch_size: int, **choices) -> PromptLoader:
    return PromptLoader(prompts(number), batch_size, **choices)


def take(source: PromptLoader, number: int) -> list[Prompt]:
    return source.take({"": number})[""]


def place(source: PromptLoader) -> tuple[int, int]:
    state = source.state_dict()
    return state["epoch"], state["position"]


def ids(batches) -> list[list[int]]:
    return [[int(prompt.id) for prompt in batch] for batch in batches]


def test_an_epoch_is_a_permutation_without_its_incomplete_last_batch():
    seen = ids(loader(11, 3))
    assert [len(batch) for batch in seen] == [3, 3, 3]
    assert len({i for batch in seen for i in batch}) == 9
    assert len(loader(11, 3)) == 3


def test_the_order_is_fixed_by_seed_and_epoch():
    first, again, other = loader(20, 4, seed=1), loader(20, 4, seed=1), loader(20, 4, seed=2)
    epochs = [ids(first), ids(first)]
    assert epochs[0] != epochs[1]
    assert epochs == [ids(again), ids(again)]
    assert epochs[0] != ids(other)


@pytest.mark.parametrize("taken", range(10))
def test_a_loaded_state_continues_with_the_very_next_batch_across_epochs(taken):
    def stream(source):
        while True:
            yield from source

    whole, first, resumed = (loader(11, 3, seed=5) for _ in range(3))
    expected = [batch for batch, _ in zip(stream(whole), range(10), strict=False)]
    steps = stream(first)
    for _ in range(taken):
        next(steps)
    state = first.state_dict()
    assert {type(value) for value in state.values()} == {int}
    iter(resumed)
    resumed.load_state_dict(state)
    iter(resumed)
    rest = [batch for batch, _ in zip(stream(resumed), range(10 - taken), strict=False)]
    assert rest == expected[taken:]


def test_prompts_that_are_taken_in_between_shift_the_passes_and_not_the_epochs():
    def epoch(source):
        for batch in source:
            taken.extend(ids([batch, take(source, 2)]))
            states.append(source.state_dict())
        return len(states)

    source, taken, states = loader(8, 2, seed=1), [], []
    first, second = loader(8, 2, seed=1), loader(8, 2, seed=1)
    assert [epoch(source), epoch(source)] == [4, 8]
    assert place(source) == (4, 0)
    expected = [batch for _ in range(4) for batch in ids(first)]
    assert taken == expected
    second.load_state_dict(states[5])  # in the second epoch, at a later pass
    assert ids(second) == expected[12:14]


def test_the_first_iteration_after_a_load_ends_with_the_epoch():
    resumed = loader(12, 3)
    resumed.load_state_dict({"epoch": 4, "position": 6})
    assert len(ids(resumed)) == 2
    assert place(resumed) == (5, 0)
    assert len(ids(resumed)) == 4


def test_the_state_after_the_last_batch_of_an_epoch_is_the_start_of_the_next():
    source = loader(7, 3)
    batches = iter(source)
    next(batches)
    assert place(source) == (0, 3)
    next(batches)
    assert place(source) == (1, 0)


def test_creating_iterators_does_not_move_the_position():
    source, expected = loader(9, 3), ids(loader(9, 3))
    for _ in range(3):
        iter(source)
    assert ids(source) == expected


def test_an_interrupted_training_iteration_continues():
    source, expected = loader(9, 3), ids(loader(9, 3))
    first = ids([next(iter(source))])
    assert first + ids(source) == expected


def test_ranks_share_each_batch_in_equal_parts():
    alone = ids(loader(13, 4, seed=3))
    ranks = [ids(loader(13, 4, seed=3, rank=rank, world_size=2)) for rank in range(2)]
    assert [left + right for left, right in zip(*ranks, strict=True)] == alone
    assert {len(batch) for rank in ranks for batch in rank} == {2}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("number", range(4, 18))
def test_validation_yields_each_prompt_once_in_as_many_non_empty_batches_on_every_rank(
    number, world_size
):
    ranks = [
        loader(number, 4, rank=rank, world_size=world_size, training=False)
        for rank in range(world_size)
    ]
    seen = [ids(rank) for rank in ranks]
    assert sorted(i for rank in seen for batch in rank for i in batch) == list(range(number))
    assert {len(rank) for rank in seen} == {len(ranks[0])}
    assert all(batch for rank in seen for batch in rank)
    assert [ids(rank) for rank in ranks] == seen


def test_validation_starts_from_the_beginning_after_an_interrupted_iteration():
    source = loader(5, 2, training=False)
    next(iter(source))
    assert ids(source) == [[0, 1], [2, 3], [4]]


def test_an_epoch_limit_shortens_epochs_but_not_the_length_that_a_trainer_sees():
    whole = loader(12, 3)
    first, second = ids(whole)[:2], ids(whole)[:2]
    for limit in (2, 0.5):
        limited = loader(12, 3, epoch_limit=limit)
        assert len(limited) == 4
        assert [ids(limited), ids(limited)] == [first, second]


def test_a_position_without_a_batch_after_it_is_the_next_epoch():
    shrunk = loader(6, 3)
    shrunk.load_state_dict({"epoch": 2, "position": 9})
    assert place(shrunk) == (3, 0)


def test_taken_prompts_come_before_the_next_batch_and_end_an_epoch_that_is_too_short():
    in_order = {"shuffle": False}
    source = loader(8, 3, **in_order)
    batches = iter(source)
    assert ids([next(batches), take(source, 1), next(batches)]) == [[0, 1, 2], [3], [4, 5, 6]]
    assert place(source) == (1, 0)
    ranks = [loader(8, 4, rank=rank, world_size=2, **in_order) for rank in range(2)]
    assert [ids([take(rank, 1), take(rank, 2)]) for rank in ranks] == [[[0], [2, 3]], [[1], [4, 5]]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("epoch_limit", [1.0, 2])
def test_peeking_returns_the_batches_that_follow_and_changes_nothing(rank, epoch_limit):
    plain, peeking = (
        loader(14, 4, seed=3, rank=rank, world_size=2, epoch_limit=epoch_limit) for _ in range(2)
    )
    expected = [batch for _ in range(4) for batch in ids(plain)]
    seen, peeked = [], []
    for _ in range(2):
        for batch in peeking:
            state = peeking.state_dict()
            peeked.append(ids(peeking.peek(number) for number in (1, 2, 4)))
            assert peeking.state_dict() == state
            seen += ids([batch])
    assert seen == expected[: len(seen)]
    assert peeked == [[expected[n + ahead] for ahead in (1, 2, 4)] for n in range(len(seen))]
    peeking.rewind()
    assert ids([next(iter(peeking))]) == seen[-1:]


def test_rewinding_undoes_the_last_batch_and_what_was_taken_since():
    source = loader(9, 3)
    batches = iter(source)
    next(batches)
    last = next(batches)
    take(source, 1)
    source.peek(1)
    source.rewind()
    assert place(source) == (0, 3)
    assert next(iter(source)) == last


def test_extra_prompts_of_several_sources_follow_each_other():
    source = loader(8, 3, shuffle=False)
    taken = source.take({"one": 2, "other": 1})
    assert list(taken) == ["one", "other"]
    assert ids(taken.values()) == [[0, 1], [2]]
    assert ids([next(iter(source))]) == [[3, 4, 5]]


def test_prompts_are_counted_and_found_by_their_ids_without_moving_the_position():
    source = loader(8, 3)
    assert source.num_prompts == len(source.some_prompts()) == 8
    found = source.find(["5", "no such id", "2"])
    assert {name: prompt.id for name, prompt in found.items()} == {"2": "2", "5": "5"}
    assert place(source) == (0, 0)


def test_too_few_prompts_for_a_batch_are_refused():
    with pytest.raises(
        ValueError, match=r"too few training prompts: 3.* needs 4 .*prompts_per_step"
    ):
        loader(3, 4)
    with pytest.raises(
        ValueError, match=r"too few held-out prompts: 1.* needs 2 .*fewer processes"
    ):
        loader(1, 4, world_size=2, training=False)


@pytest.mark.parametrize("batch_size", [0, 3])
def test_a_batch_size_that_the_ranks_cannot_share_is_refused(batch_size):
    with pytest.raises(ValueError, match="prompts_per_step must be a positive multiple of 2"):
        loader(9, batch_size, world_size=2)


def test_one_process_needs_no_multiple():
    with pytest.raises(UserError, match=r"prompts_per_step must be >= 1, got -1\. Set data\.pro"):
        PromptLoader(prompts(4), -1)
