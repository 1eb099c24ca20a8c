"""The tests behind the matrix of features in docs/scale.md: for each cell of several processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

from paths import TESTS

FOLDER = TESTS / "end_to_end"
LETTERS = {
    "S": "test_sharded",
    "P": "test_sharded_presets",
    "C": "test_sharded_chunks",
    "K": "test_sharded_compiled",
    "V": "test_sharded_servers",
    "L": "test_stops_of_ranks",
    "M": "test_two_nodes",
}
"""The files that the matrix has letters for."""
STAGES = (1, 2, 3)
ZERO = tuple(f"zero{stage}" for stage in STAGES)
DEEPSPEED = tuple(f"deepspeed_stage_{stage}" for stage in STAGES)

STEPS = "S::test_a_sharded_policy_takes_the_steps_of_ddp"
OBJECTIVE = "S::test_an_objective_over_ranks_or_models_takes_the_steps_of_ddp"
PRESET = "P::test_a_sharded_policy_takes_the_steps_of_ddp"
COMPILED = "S::test_a_compiled_sharded_policy_takes_the_steps_of_ddp"
DDP_COMPILED = "K::test_ddp_trains_compiled_as_without_and_resumes_bit_identically"
ZERO_COMPILED = "K::test_deepspeed_trains_compiled_and_resumes_bit_identically"
MIXED = "S::test_deepspeed_takes_the_steps_of_ddp_under_autocast"
CHUNKS = "C::test_ranks_with_unlike_numbers_of_chunks_take_the_steps_of_ddp"
HEAD_REFUSED = "C::test_a_head_of_several_layers_is_refused_in_stage_3_of_deepspeed"
SFT = "S::test_sft_takes_the_steps_of_ddp"
SETTINGS = "S::test_the_settings_of_deepspeed_change_no_step"
ATTACHED = "V::test_an_attached_server_gets_all_trained_weights_of_a_sharded_policy"
LAUNCHED = "V::test_a_launched_server_gets_the_adapter_of_a_sharded_policy_that_samples_ahead"
COPY = "C::test_the_copy_that_is_sent_to_servers_is_whole_and_on_one_rank"
RESUMED = "S::test_a_resumed_run_ends_bit_identically"
ZERO_RESUMED = "S::test_a_run_under_deepspeed_resumes_bit_identically"
OTHER_STRATEGY = "S::test_a_run_goes_on_under_the_other_strategy"
OTHER_STAGE = "S::test_a_run_goes_on_in_another_stage_of_deepspeed_or_without_it"
NUM_RANKS = "S::test_a_run_goes_on_with_another_number_of_ranks"
ZERO_NUM_RANKS = "S::test_a_run_under_deepspeed_goes_on_with_another_number_of_ranks"
DEVICE = "S::test_on_a_device_a_sharded_policy_takes_the_steps_of_ddp"
ZERO_DEVICE = "S::test_deepspeed_takes_the_steps_of_ddp_on_a_device"
RESUMED_DEVICE = "S::test_a_resumed_run_ends_bit_identically_on_a_device"
AHEAD = "test_ddp::test_each_rank_goes_on_with_what_it_had_sampled_ahead"
LEAVE = "L::test_a_signal_to_one_rank_leaves_what_both_do"
LEAVE_SHARED = "L::test_ranks_that_share_a_model_leave_and_go_on"
LEAVE_WAIT = "L::test_ranks_that_share_a_model_leave_what_one_of_them_waits_for"
KILLED = "L::test_a_rank_leaves_when_one_that_it_shares_a_model_with_is_killed"
CRASH = "M::test_a_machine_that_crashes_ends_the_other"

REFERENCES = [
    *(
        "experts of files, with a reference",
        "moving reference",
        "reference in the reward, several updates",
    ),
    *("lora with a reference", "lora with a moving reference"),
    *("tied, checkpointing", "padded, entropy"),
]
GOES_ON, GOES_ON_LORA = "moving reference", "lora with a reference"
SKIPPED = ["a rank without rewards", "not finite", "rolled back"]


def with_each(test: str, firsts: Sequence[str], *last: str) -> list[str]:
    """Return the ids of a test with each first parameter, and with each last one."""
    return [f"{test}[{first}-{one}]" for first in firsts for one in last]


def steps(cases: Sequence[str], stages: Sequence[str] = ZERO) -> tuple[list[str], ...]:
    """Return the ids of a case for three columns; those of FSDP2 compare with a run of DDP."""
    sharded = with_each(STEPS, cases, "fsdp2")
    return sharded, sharded, with_each(STEPS, cases, *stages)


COVERED: dict[str, tuple[list[str], ...]] = {
    "all weights, `HFEngine`": (
        ["test_ddp::test_two_ranks_take_the_step_of_the_union_of_their_rollouts[both-ranks]"],
        *steps(["plain"])[1:],
    ),
    "LoRA, `HFEngine`": steps(["files, lora"]),
    "shared prompts in the cache": steps(["plain"]),
    "references of every kind": steps(REFERENCES),
    "every [preset]": (
        [f"{PRESET}[grpo-fsdp2]"],
        [f"{PRESET}[grpo-fsdp2]"],
        [f"{PRESET}[grpo-zero3]"],
    ),
    "many tokens of high covariance": (
        with_each(OBJECTIVE, ["kl_cov", "teacher"], "fsdp2"),
        with_each(OBJECTIVE, ["kl_cov", "teacher"], "fsdp2"),
        with_each(OBJECTIVE, ["kl_cov", "teacher"], "zero3"),
    ),
    "`policy.compile` |": (
        [DDP_COMPILED],
        [f"{COMPILED}[fsdp2]"],
        [f"{COMPILED}[{stage}]" for stage in ZERO],
    ),
    "`policy.compile` with LoRA": (
        [DDP_COMPILED],
        ["K::test_fsdp2_goes_on_compiled_from_a_checkpoint_of_ddp"],
        [f"{ZERO_COMPILED}[zero2]", f"{ZERO_COMPILED}[zero3]"],
    ),
    "the tests' stand-in for a GPU": (
        ["S::test_on_a_device_ddp_takes_the_same_steps"],
        [
            f"{DEVICE}[lora with a moving reference-fsdp2]",
            f"{DEVICE}[plain-offloaded]",
            f"{RESUMED_DEVICE}[fsdp2-on_devices]",
        ],
        [
            f"{ZERO_DEVICE}[padded, entropy-zero1]",
            f"{ZERO_DEVICE}[reference in the reward, several updates-zero2]",
            f"{ZERO_DEVICE}[plain-zero3 offloaded]",
            f"{RESUMED_DEVICE}[zero3-zero_on_devices]",
        ],
    ),
    "`bf16-mixed`": (
        [f"{MIXED}[zero1]"],
        ["C::test_fsdp2_in_mixed_precision_takes_the_first_step_of_bfloat16_weights"],
        [f"{MIXED}[{stage}]" for stage in ZERO],
    ),
    "a head in several chunks": (
        [f"{CHUNKS}[chunks-fsdp2]"],
        [f"{CHUNKS}[chunks-fsdp2]"],
        [f"{CHUNKS}[chunks-zero2]", f"{CHUNKS}[chunks-zero3]"],
    ),
    "the head in `modules_to_save`": (
        [f"{CHUNKS}[chunks, trained head-fsdp2]"],
        [f"{CHUNKS}[chunks, trained head-fsdp2]"],
        [
            f"{CHUNKS}[chunks, trained head-zero2]",
            f"{HEAD_REFUSED}[chunks, trained head]",
        ],
    ),
    "LoRA on the head": (
        [f"{CHUNKS}[chunks, adapted head-fsdp2]"],
        [f"{CHUNKS}[chunks, adapted head-fsdp2]"],
        [f"{CHUNKS}[chunks, adapted head-zero2]", f"{HEAD_REFUSED}[chunks, adapted head]"],
    ),
    "a rank with nothing to train on": steps(SKIPPED),
    "warm-up (SFT)": (
        with_each(SFT, ["sft", "sft not finite"], "fsdp2"),
        with_each(SFT, ["sft", "sft not finite"], "fsdp2"),
        with_each(SFT, ["sft", "sft not finite"], *ZERO),
    ),
    "offloading to host memory": (
        [],
        ["S::test_the_settings_of_the_strategy_change_no_step[offloaded]"],
        [f"{SETTINGS}[{stage} offloaded]" for stage in ZERO],
    ),
    "servers that a run launches": (
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[deepspeed_stage_3]"],
    ),
    "servers in `urls`": (
        [f"{ATTACHED}[fsdp2]"],
        [f"{ATTACHED}[fsdp2]"],
        [f"{ATTACHED}[{stage}]" for stage in DEEPSPEED],
    ),
    "LoRA, servers": (
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[deepspeed_stage_3]"],
    ),
    "sampling ahead (`max_head_offpolicyness`), servers": (
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[fsdp2]"],
        [f"{LAUNCHED}[deepspeed_stage_3]"],
    ),
    "`weight_transfer: nccl`": ([f"{COPY}[ddp]"], [f"{COPY}[fsdp2]"], [f"{COPY}[zero3]"]),
    "resume, bit for bit": (
        [f"{LEAVE}[generation]"],
        [
            *(f"{RESUMED}[{case}]" for case in (GOES_ON, GOES_ON_LORA)),
            "S::test_a_checkpoint_written_in_the_background_is_of_its_step",
        ],
        with_each(ZERO_RESUMED, (GOES_ON, GOES_ON_LORA), *ZERO),
    ),
    "resume with servers": (
        [
            f"{CRASH}_which_names_it[0-generation]",
            "M::test_a_signal_to_one_rank_leaves_both_machines_and_servers_that_were_attached",
        ],
        [f"{ATTACHED}[fsdp2]"],
        [f"{ATTACHED}[deepspeed_stage_3]"],
    ),
    "resume under another strategy": (
        [f"{OTHER_STRATEGY}[ddp-fsdp2-{GOES_ON}]", f"{OTHER_STAGE}[ddp-zero3-{GOES_ON}]"],
        [f"{OTHER_STRATEGY}[fsdp2-ddp-{GOES_ON}]"],
        [f"{OTHER_STAGE}[{one}-{GOES_ON}]" for one in ("zero1-fsdp2", "zero2-ddp", "zero3-zero2")],
    ),
    "resume with another number of ranks": (
        [f"{NUM_RANKS}[{GOES_ON}]", f"{ZERO_NUM_RANKS}[{GOES_ON}-zero1]"],
        [f"{NUM_RANKS}[{GOES_ON_LORA}]"],
        [
            *with_each(ZERO_NUM_RANKS, [GOES_ON], *ZERO),
            f"{ZERO_NUM_RANKS}[{GOES_ON_LORA}-zero3]",
        ],
    ),
    "resume when sampling ahead": (
        [f"{AHEAD}[ddp]"],
        [f"{AHEAD}[fsdp2]"],
        [f"{AHEAD}[deepspeed_stage_2]"],
    ),
    "stopping at a signal or a time limit": (
        [f"{LEAVE}[generation]"],
        [f"{LEAVE_SHARED}[fsdp2-generation]"],
        [f"{LEAVE_SHARED}[deepspeed_stage_2-generation]"],
    ),
    "… scoring": (
        [f"{LEAVE}[a reward on one rank]"],
        [f"{LEAVE_SHARED}[fsdp2-a reward on one rank]"],
        [f"{LEAVE_SHARED}[deepspeed_stage_1-a reward on one rank]"],
    ),
    "… a validation": (
        [f"{LEAVE}[evaluation]"],
        [f"{LEAVE_SHARED}[fsdp2-evaluation]"],
        [f"{LEAVE_SHARED}[deepspeed_stage_3-evaluation]"],
    ),
    "… the pause of an outage": (
        ["L::test_a_signal_leaves_the_pause_of_an_outage_that_one_rank_has"],
        [f"{LEAVE_WAIT}[leave_outage-fsdp2]"],
        [f"{LEAVE_WAIT}[leave_outage-deepspeed_stage_3]"],
    ),
    "… the wait for a server": (
        ["L::test_a_signal_leaves_the_wait_for_a_server[start]"],
        [f"{LEAVE_WAIT}[leave_server-fsdp2]"],
        [f"{LEAVE_WAIT}[leave_server-deepspeed_stage_3]"],
    ),
    "stopping when another rank is killed": (
        [f"{CRASH}_which_names_it[0-generation]"],
        [
            *(f"{KILLED}[fsdp2-held0-False-0]", f"{KILLED}[fsdp2-held1-True-1]"),
            f"{CRASH}_while_they_share_a_policy",
        ],
        [f"{KILLED}[{stage}-held{n}-False-1]" for n, stage in enumerate(DEEPSPEED, 2)],
    ),
    "stopping when a rank is stuck": (
        ["L::test_a_watchdog_ends_both_ranks_although_one_scores_for_ever"],
        [f"{LEAVE_WAIT}[leave_stalled-fsdp2]"],
        [f"{LEAVE_WAIT}[leave_stalled-deepspeed_stage_3]"],
    ),
}
"""Beginning of a row -> ids of tests under ``ddp``, ``fsdp2`` and DeepSpeed."""


def file_of(test_id: str) -> str:
    """Return the name of the file of a test, without its ending."""
    file = test_id.partition("::")[0]
    return LETTERS.get(file, file)


@cache
def all_ids(file: str) -> set[str]:
    """Return what pytest calls the tests of a file, without collecting or running them."""
    spec = importlib.util.spec_from_file_location(f"ids_of_{file}", FOLDER / f"{file}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        f"{name}[{'-'.join(chosen)}]" if chosen else name
        for name, function in vars(module).items()
        if name.startswith("test_")
        for chosen in product(*_choices(function))
    }


def _choices(function: Any) -> Iterator[list[str]]:
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, values = mark.args
            names = names if isinstance(names, tuple) else (names,)
            given = mark.kwargs.get("ids")
            yield list(given or (_id(names, one, n) for n, one in enumerate(values)))


def _id(names: Sequence[str], value: Any, number: int) -> str:
    """Return the part of an id for a value of a parameter, or for a tuple of values of several."""
    values = getattr(value, "values", None)  # of a `pytest.param`
    if not isinstance(values, tuple):
        values = value if len(names) > 1 else (value,)
    parts = []
    for name, one in zip(names, values, strict=True):
        known = one if isinstance(one, (str, int, float, bool)) else getattr(one, "__name__", None)
        parts.append(f"{name}{number}" if known is None else str(known))
    return "-".join(parts)
