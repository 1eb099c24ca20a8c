"""Several sources in one step: exact numbers, orders of their own, phases, ranks, resuming."""

from collections import Counter
from dataclasses import replace

import pytest
from tiny import prompt

from lit_grpo.data.loading.curriculum import Curriculum, Phase
from lit_grpo.data.loading.mixture_loader import MixtureLoader
from lit_grpo.data.loading.order import TableOrder
from lit_grpo.types import Prompt, UserError

TWO_PHASES = Curriculum(
    phases=(
        Phase(weights={"a": 0.75, "b": 0.25}, fraction=1),
        Phase(weights={"a": 0.25, "b": 0.75}, fraction=1, lr_scale=0.5),
    ),
    boundaries=(3,),
)


ONE_PHASE = Curriculum(phases=(Phase(weights={"a": 1.0}, fraction=1.0),))


class Steps:
    """A clock that the test moves."""

    def __init__(self):
        self.done = 0

    def __call__(self, ahead: int) -> int:
        return self.done + ahead


def order(name: str, number: int, seed: int = 0) -> TableOrder:
    rows = [
        Prompt(id=f"{name}{row}", text="x", token_ids=(1,), source=name, row=row)
        for row in range(number)
    ]
    return TableOrder(name, rows, (seed,))


def loader(steps=None, curriculum=TWO_PHASES, sizes=(7, 5), batch_size=4, **choices):
    orders = [order("a", sizes[0]), order("b", sizes[1])]
    return MixtureLoader(orders, batch_size, curriculum, steps or Steps(), **choices)


def ids(batch) -> list[str]:
    return [prompt.id for prompt in batch]


def train(source: MixtureLoader, steps: Steps, number: int) -> list[list[str]]:
    """Take batches as a trainer does, one optimizer step after each."""
    batches = []
    while len(batches) < number:
        for batch in source:
            batches.append(ids(batch))
            steps.done += 1
            if len(batches) == number:
                break
    return batches


def test_every_step_has_the_exact_numbers_of_its_phase():
    steps = Steps()
    batches = train(loader(steps), steps, 8)
    numbers = [Counter(name[0] for name in batch) for batch in batches]
    assert numbers == [{"a": 3, "b": 1}] * 3 + [{"a": 1, "b": 3}] * 5


def test_each_source_goes_through_its_rows_in_its_own_order_whatever_the_others_do():
    steps = Steps()
    batches = train(loader(steps), steps, 8)
    seen = {name: [one for batch in batches for one in batch if one[0] == name] for name in "ab"}
    for name, size in (("a", 7), ("b", 5)):
        alone = ids(order(name, size).take(len(seen[name])))
        assert Counter(seen[name]) == Counter(alone)
        assert sorted(alone[:size]) == sorted(f"{name}{row}" for row in range(size))
    other, moved = Steps(), Steps()
    assert train(loader(other, sizes=(7, 9)), other, 1) != train(loader(moved), moved, 1)
    first = [{one for one in batch if one[0] == "a"} for batch in batches]
    other = Steps()
    again = train(loader(other, sizes=(7, 50)), other, 8)
    assert [{one for one in batch if one[0] == "a"} for batch in again] == first


def test_sources_are_mixed_and_epochs_are_permuted_anew():
    batches = [batch for _ in range(3) for batch in map(ids, loader(batch_size=8, sizes=(60, 60)))]
    places = {tuple(name[0] for name in batch) for batch in batches}
    assert len(places) > 5
    epochs = order("a", 60)
    assert ids(epochs.take(60)) != ids(epochs.take(60))


@pytest.mark.parametrize("taken", range(9))
def test_a_loaded_state_goes_on_with_the_very_next_batch(taken):
    steps = Steps()
    whole = train(loader(steps), steps, 9)
    steps = Steps()
    first = loader(steps)
    train(first, steps, taken)
    state = first.state_dict()
    resumed = loader(steps)
    resumed.load_state_dict(state)
    assert train(resumed, steps, 9 - taken) == whole[taken:]


def test_ranks_share_each_batch_and_each_refill():
    steps = Steps()
    ranks = [loader(steps, rank=rank, world_size=2) for rank in range(2)]
    alone = loader(steps)
    for _ in range(3):
        left, right = (ids(next(iter(one))) for one in ranks)
        assert left + right == ids(next(iter(alone)))
        parts = [one.take({"b": 1, "a": 2}) for one in ranks]
        whole = alone.take({"b": 2, "a": 4})
        for name in "ab":
            assert ids(parts[0][name]) + ids(parts[1][name]) == ids(whole[name])
    assert ranks[0].state_dict() == ranks[1].state_dict() == alone.state_dict()


def test_peeking_sees_the_next_phase_and_takes_nothing():
    steps = Steps()
    source = loader(steps)
    next(iter(source))
    state, metrics = source.state_dict(), source.metrics()
    ahead = [ids(source.peek(number)) for number in (1, 2, 3)]
    assert source.state_dict() == state
    assert source.metrics() == metrics
    steps.done += 1
    assert train(source, steps, 3) == ahead


def test_an_undone_batch_comes_again_with_its_refills():
    steps = Steps()
    source = loader(steps)
    train(source, steps, 1)
    batch = ids(next(iter(source)))
    refill = ids(source.take({"a": 2})["a"])
    source.rewind()
    assert ids(next(iter(source))) == batch
    assert ids(source.take({"a": 2})["a"]) == refill


def test_an_epoch_has_as_many_batches_as_the_rows_fill():
    source = loader()
    assert len(source) == 3
    assert source.num_prompts == 12
    assert [len(list(source)) for _ in range(3)] == [3, 3, 3]
    assert len(list(loader(epoch_limit=2))) == 2
    assert len(loader(sizes=(3, 3), batch_size=4)) == 1


def test_metrics_say_the_phase_and_the_shares():
    steps = Steps()
    source = loader(steps)
    train(source, steps, 4)
    assert source.metrics() == {
        "data/a/share": 0.25, "data/b/share": 0.75, "curriculum/phase": 2,
        "curriculum/lr_scale": 0.5,
    }  # fmt: skip
    plain = Curriculum(phases=(Phase(weights={"a": 1, "b": 1}, fraction=1),))
    assert loader(curriculum=plain).metrics() == {"data/a/share": 0.5, "data/b/share": 0.5}


def test_prompts_are_found_by_their_ids():
    found = loader().find(["a3", "b0", "c0"])
    assert sorted(found) == ["a3", "b0"]
    assert len(loader().some_prompts()) == 12
    assert len(order("a", 100).some_prompts(10)) == 10


def test_the_settings_tell_rows_of_the_same_ids_and_other_orders_apart():
    def settings(**change):
        rows = [replace(one, **change) for one in (prompt(id="1"), prompt(id="2"))]
        return MixtureLoader([TableOrder("a", rows, (0,))], 2, ONE_PHASE, Steps()).settings()

    own = settings()
    assert own == settings()
    assert own["prompts_per_step"] == 2
    assert own["sources.a.rows"].startswith("2 (checksum ")
    assert settings(text="other") != own
    assert settings(answer="other") != own
    (one, other) = (order("a", 5, seed).describe_rows() for seed in (0, 1))
    assert one.removesuffix("0") == other.removesuffix("1")


def test_a_state_of_other_rows_or_sources_is_refused():
    state = loader().state_dict()
    with pytest.raises(UserError, match="rows of the source 'b' are not those of the run"):
        loader(sizes=(7, 6)).load_state_dict(state)
    del state["sources"]["b"]
    with pytest.raises(UserError, match="must be those of the run, a, got a, b"):
        loader().load_state_dict(state)
    with pytest.raises(UserError, match="must be those of the run, none"):
        loader().load_state_dict({"epoch": 0, "position": 3})


def test_boundaries_that_have_moved_are_said(caplog):
    longer = Curriculum(phases=TWO_PHASES.phases, boundaries=(6,))
    with caplog.at_level("WARNING", logger="lit_grpo"):
        loader(curriculum=longer).load_state_dict(loader().state_dict())
    assert "[3] and end now after [6]" in caplog.text


def test_a_source_with_too_few_rows_for_a_step_and_ranks_that_cannot_share_are_refused():
    with pytest.raises(UserError, match="the source 'a' has 2, and its weight asks for 3"):
        loader(sizes=(2, 5))
    with pytest.raises(UserError, match="multiple of 3"):
        loader(world_size=3)
