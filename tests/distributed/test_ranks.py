from functools import partial
from types import SimpleNamespace

import torch
from forked import run_in_processes
from tiny import rollouts

from lit_grpo.distributed.ranks import (
    any_failure,
    gather_objects,
    gather_rewards,
    get_rank,
    get_world_size,
    sum_over_ranks,
)


def test_without_a_process_group_there_is_one_rank():
    assert (get_rank(), get_world_size()) == (0, 1)
    assert gather_objects("mine") == ["mine"]
    assert any_failure("broken") == "broken"
    assert any_failure("") == ""
    assert any_failure(None) is None
    assert any_failure(error := ValueError("broken")) is error


def communicate(store, rank):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        return (
            get_rank(),
            get_world_size(),
            gather_objects({"rank": rank}),
            any_failure("only the second" if rank else ""),
            any_failure(f"both, rank {rank}"),
            any_failure(""),
        )
    finally:
        torch.distributed.destroy_process_group()


def test_ranks_exchange_values_and_share_the_first_failure(tmp_path):
    results = run_in_processes(*(partial(communicate, tmp_path / "store", rank) for rank in (0, 1)))
    for rank, (*position, gathered, one_failed, both_failed, none_failed) in enumerate(results):
        assert position == [rank, 2]
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert one_failed == "only the second"
        assert both_failed == "both, rank 0"
        assert none_failed == ""


def module_of(*, world_size=1, **strategy):
    """The parts of a LightningModule that are read; the other rank has the values times ten."""
    return SimpleNamespace(
        device="cpu",
        trainer=SimpleNamespace(world_size=world_size, strategy=SimpleNamespace(**strategy)),
        all_gather=lambda own: torch.stack([own, own * 10]),
    )


def test_rewards_are_gathered_for_statistics_over_all_ranks():
    own = rollouts([[1, 2]]).reward_table({"task": 1.0})
    assert gather_rewards(module_of(), own) is own
    gathered = gather_rewards(module_of(world_size=2), own)
    assert gathered.rewards.tolist() == gathered.parts["task"].tolist() == [[1, 2], [10, 20]]
    assert gathered.lengths.tolist() == [own.lengths[0].tolist(), (own.lengths[0] * 10).tolist()]
    assert gathered.valid.bool().all()
    assert gathered.weights == own.weights


def test_values_are_summed_over_ranks_in_one_reduction():
    reductions = []

    def reduce(values, reduce_op):
        reductions.append(reduce_op)
        return values * 3

    sums = sum_over_ranks(module_of(reduce=reduce), [torch.tensor(1), torch.tensor(2)])
    assert sums == [3, 6]
    assert reductions == ["sum"]
