"""Measure the targets for a GPU: the update's MFU, and a step against its bare parts.

The bare parts are the engine alone, and a plain forward and backward pass over as many tokens as
the update has to process.
"""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import torch
from _benchmark.bare import bare_update_pass
from _gpu_check.device import Device
from _gpu_check.equality import precision_context
from _gpu_check.findings import Recorder
from _gpu_check.sizes import CheckSize
from _gpu_check.steps import Observer, Step, record_figures, train

from lit_grpo.policy import Policy
from lit_grpo.rollout import HFEngine, Sampling

NUM_STEPS = 5
NUM_WARM_UP = 2
NUM_RUNS = 3
"""Of each bare part, after one that warms up."""
LEAST_SECONDS = 120
"""Below this there is no time for a model of 1.5B."""
RESERVE_SECONDS = 40
"""Left for the bare parts."""
STEP_AIM = 1.2
CASE = "larger model: "
"""Beginning of the names of the figures."""


def check_aims(recorder: Recorder, device: Device, size: CheckSize) -> None:
    """Make a few steps with the larger model, and record them and their bare parts."""
    if device.name == "cuda" and recorder.seconds_left < LEAST_SECONDS:
        recorder.skip("the larger model", f"{recorder.seconds_left:.0f} s were left.")
        return
    with recorder.attempt("the larger model"):
        larger = size.larger
        observer = Observer(device, {}, lambda: recorder.seconds_left > RESERVE_SECONDS)
        module = train(device, larger, observer, NUM_STEPS)
        steps = observer.steps[NUM_WARM_UP:] or observer.steps
        record_figures(recorder, steps, device, larger, CASE)
        packs = module.policy.body_and_head.uses_packing
        recorder.state(f"{CASE}packed", packs)
        policy = module.policy.to(device.device)
        record_bare_parts(recorder, steps, device, larger, policy)


def record_bare_parts(
    recorder: Recorder, steps: list[Step], device: Device, size: CheckSize, policy: Policy
) -> None:
    """Record the seconds of the bare parts, and the step's and the update's against them."""
    how = f"median of {NUM_RUNS} runs"
    with precision_context(device.precision, device):
        engine = device.median_seconds(engine_run(size, policy), NUM_RUNS, num_warm_up=1)
        bare = device.median_seconds(bare_update_run(size, policy), NUM_RUNS, num_warm_up=1)
    recorder.figure(f"{CASE}engine alone", engine, "s", how)
    recorder.figure(f"{CASE}bare update", bare, "s", f"forward and backward, {how}")
    update = median(step.stages["update"] for step in steps)
    recorder.figure(f"{CASE}update / bare update", update / bare, "ratio")
    # The engine's rate counts: steps may have sampled fewer tokens than it did alone.
    sampled = median(step.num_completion_tokens for step in steps)
    alone = engine * sampled / (size.workload.num_rows * size.workload.max_tokens)
    ratio = median(step.seconds for step in steps) / (alone + bare)
    aim = f"aim: at most {STEP_AIM}"
    recorder.figure(f"{CASE}step / (engine alone + bare update)", ratio, "ratio", aim)


def engine_run(size: CheckSize, policy: Policy) -> Any:
    """Return a function that samples the completions of a step."""
    engine, workload = HFEngine(), size.workload
    engine.load_weights(policy, 0)
    sampling, prompts = Sampling(max_tokens=workload.max_tokens), size.prompts(workload.num_prompts)
    return lambda: list(engine.generate(prompts, workload.group_size, sampling, seed=0))


def bare_update_run(size: CheckSize, policy: Policy) -> Any:
    """Return a function that runs forward, logprobs and backward, with the step's tokens."""
    workload, model = size.workload, policy.model
    draw = random.Random(0)
    rows = [size.tokens(draw, workload.packed_row_tokens) for _ in range(workload.num_rows)]
    ids = torch.tensor(rows).to(model.device)
    micro_batch_rows = max(1, size.max_tokens_per_micro_batch // workload.packed_row_tokens)
    return lambda: bare_update_pass(
        model, ids, num_targets=workload.max_tokens, micro_batch_rows=micro_batch_rows
    )
