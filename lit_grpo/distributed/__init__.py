"""Communicate between the ranks of a run, and shard a model over them."""

from lit_grpo.distributed.ranks import (
    any_failure,
    gather_objects,
    gather_rewards,
    get_rank,
    get_world_size,
    max_over_ranks,
    sum_over_ranks,
)

__all__ = [
    "any_failure",
    "gather_objects",
    "gather_rewards",
    "get_rank",
    "get_world_size",
    "max_over_ranks",
    "sum_over_ranks",
]
