"""What makes a step of 1,000 parameters fit, with limits by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from setups import SIZES, make

from lit_grpo.cli.estimate.memory import estimate_memory
from lit_grpo.cli.estimate.setup import Sampler
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.cli.plan.remedies import ADAPTER, find_remedy
from lit_grpo.training import UpdateConfig

LARGE = replace(
    SIZES,
    num_layers=100,
    parameters=10**10,
    trained_parameters=10**10,
    layer_parameters=10**8,
)
GIB = 2**30
H100 = 75 * GIB
SERVED = Sampler(kind="servers")


def peak(setup) -> int:
    return estimate_memory(setup).peak


def large(*arguments, **settings):
    state = replace(make().optimizer, state_bytes=8 * 10**10)
    return make(*arguments, model=LARGE, optimizer=state, **settings)


def test_a_setting_is_advised_if_it_is_enough():
    setup = make(update=UpdateConfig(max_tokens_per_micro_batch=10**6))
    limit = peak(replace(setup, checkpointing=True))
    assert limit < peak(setup)
    assert find_remedy(setup, limit) == "set model.policy.gradient_checkpointing to true"


def test_several_settings_are_advised_if_only_all_are_enough():
    setup = make()
    step = replace(setup.step, micro_batches=4, micro_batch_rows=1, micro_batch_tokens=16)
    small = replace(setup, checkpointing=True, step=step)
    remedy = find_remedy(setup, peak(small))
    assert remedy is not None
    assert remedy.startswith("set model.policy.gradient_checkpointing to true and lower model.")


def test_ranks_that_have_everything_whole_are_to_divide_it():
    setup = large("ddp", 4, sampler=SERVED)
    assert find_remedy(setup, H100) == "set trainer.strategy to fsdp2"


def test_the_fewest_gpus_are_named_with_what_they_need():
    remedy = find_remedy(large(sampler=SERVED), H100)
    assert remedy == (
        "use at least 3 GPUs (--gpus 3xH100), set trainer.strategy to fsdp2 and set "
        "data.prompts_per_step to a multiple of 3"
    )
    divided = replace(large("fsdp2", 3, sampler=SERVED).step, num_ranks=1)
    assert peak(large("fsdp2", 3, sampler=SERVED, step=divided)) <= H100
    assert peak(large("fsdp2", 2, sampler=SERVED, step=divided)) > H100


def test_vllm_in_the_process_is_not_advised_on_several_gpus():
    vllm = Sampler(kind="vllm", memory_fraction=0.3, sleeps=True)
    remedy = find_remedy(large(sampler=vllm), H100)
    assert remedy is not None
    assert "sample with servers on GPUs that no rank uses" in remedy


def test_what_has_been_changed_already_comes_first():
    setup = make()
    assert find_remedy(setup, peak(setup), first=ADAPTER) == ADAPTER


@pytest.mark.parametrize("limit", [0, 1000])
def test_there_is_none_if_a_rank_has_no_room_for_anything(limit):
    assert find_remedy(make(), limit) is None


def test_fewer_completions_at_a_time_come_before_servers_on_further_gpus():
    update = UpdateConfig(max_tokens_per_micro_batch=1000)
    step = step_sizes([6] * 64, 1000, num_ranks=1, group_size=8, update=update)
    setup = make(step=step, sampler=Sampler(max_concurrent=4096))
    smaller = replace(setup, sampler=Sampler(max_concurrent=128))
    assert peak(smaller) < peak(setup)
    assert find_remedy(setup, peak(smaller)) == "lower model.engine.init_args.max_concurrent to 128"
