"""Measure real steps: the peak of the memory in processes of their own, and seconds in turns."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from small_runs import ShareOfLowBytes, make_trainer
from tiny import prompt
from torch.optim import AdamW

from lit_grpo.cli.estimate.calibration import measure_cpu
from lit_grpo.cli.estimate.config import _old_passes
from lit_grpo.cli.estimate.devices import Cluster, Device
from lit_grpo.cli.estimate.memory import SAMPLING, SAVING, MemoryPart, estimate_memory
from lit_grpo.cli.estimate.seconds import StepTime, estimate_seconds
from lit_grpo.cli.estimate.setup import Sampler, Setup, make_setup
from lit_grpo.cli.estimate.step import step_sizes
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.distributed.ranks import get_rank
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.policy import LoRA, Policy
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.training import Evaluation, GRPOModule, UpdateConfig
from lit_grpo.types import Completion, Prompt

PROMPTS = 4
SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "vocab_size": 4096,
}
STAGES = {
    "generation": "collect",
    "logprobs": "build_train_batch",
    "update": "take_optimizer_steps",
}
"""Part of the plan -> method of the module that takes its time."""
LAYERS = "num_hidden_layers"
FOUND = "found: "
"""How the line with the results begins; DeepSpeed prints others."""
_RATES = dict.fromkeys(("flops", "flops_float32", "bandwidth", "link", "network"), 1.0)
CPU = Device(name="cpu", memory=1, is_gpu=False, **_RATES)
"""A device for what does not depend on how fast it is."""


class ShortAtFirst(HFEngine):
    """Sample a few tokens in the first step, after which the optimizer's states are there."""

    is_first = True

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        if self.is_first:
            few = min(8, sampling.max_tokens)
            sampling = replace(sampling, min_tokens=few, max_tokens=few)
        self.is_first = False
        return super().generate(prompts, group_size, sampling, seed=seed)


def build(case: dict[str, Any], engine: HFEngine | None = None) -> GRPOModule:
    """Build a training run of completions that are all equally long."""
    tokens = case.get("completion", 64)
    lora = LoRA(rank=case["rank"]) if "rank" in case else None
    return GRPOModule(
        Policy(
            architecture=SHAPE | case.get("shape", {}),
            gradient_checkpointing=case.get("checkpointing", False),
            lora=lora,
        ),
        [ShareOfLowBytes()],
        group_size=case.get("group", 8),
        sampling=Sampling(max_tokens=tokens, min_tokens=tokens),
        update=UpdateConfig(
            max_tokens_per_micro_batch=case.get("budget", 16384),
            minibatches=case.get("minibatches", 1),
        ),
        objective=Objective(kl=KLTerm(coef=case.get("kl", 0.0))),
        evaluation=Evaluation(before_training=False),
        optimizer=partial(AdamW, lr=1e-5),
        engine=engine or HFEngine(),
    )


def loader(case: dict[str, Any], **ranks: int) -> PromptLoader:
    length = case.get("prompt", 64) - 1
    prompts = [prompt(chr(97 + n) + "a" * length, id=str(n)) for n in range(PROMPTS)]
    return PromptLoader(prompts, PROMPTS, shuffle=False, **ranks)


class OfRank(L.LightningDataModule):
    """The prompts of each rank."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> PromptLoader:
        trainer = self.trainer
        return loader(self.case, rank=trainer.global_rank, world_size=trainer.world_size)


def setup_of(case: dict[str, Any], device: Device | None = None) -> Setup:
    """Return what the plan says of the training; without a device its CPU is measured."""
    module, ranks = build(case), case.get("ranks", 1)
    outline = module.policy.outline()
    step = step_sizes(
        [case.get("prompt", 64)] * (PROMPTS // ranks),
        module.sampling.max_tokens,
        num_ranks=ranks,
        group_size=module.group_size,
        update=module.update,
    )
    from lit_grpo.cli.estimate.model_sizes import sizes_of

    device = device or measure_cpu(sizes_of(outline), step.num_rows, step.completion_tokens)
    return make_setup(
        outline,
        module.build_optimizer,
        step,
        Cluster(device=device, per_node=ranks),
        strategy=case.get("strategy", "auto"),
        with_reference=module.needs_reference,
        checkpointing=module.policy.gradient_checkpointing,
        sampler=Sampler(),
        reference_passes=int(module.needs_reference),
        old_passes=_old_passes(module),
    )


def predict_seconds(cases: list[dict[str, Any]], rounds: int = 3) -> list[StepTime]:
    """Return what the plan says of training runs whose CPU is measured in turns.

    Of several measurements the fastest of each rate counts, because other work only makes a machine
    slower, and models of the same shapes have the same rates.
    """
    measured = [[setup_of(case).cluster.device for case in cases] for _ in range(rounds)]
    found = []
    for case in cases:
        same = [
            device
            for devices in measured
            for device, other in zip(devices, cases, strict=True)
            if shapes(other) == shapes(case)
        ]
        device = fastest(same, [device for devices in measured for device in devices])
        found.append(estimate_seconds(setup_of(case, device), 0))
    return found


def shapes(case: dict[str, Any]) -> dict[str, Any]:
    """Return what the rates of products and attention depend on."""
    sizes = {key: value for key, value in case.get("shape", {}).items() if key != LAYERS}
    return sizes | {"group": case.get("group", 8)}


def fastest(same: list[Device], everything: list[Device]) -> Device:
    """Return a device with the fastest of each rate.

    Args:
        same: Measured with the same shapes.
        everything: Further ones, for what depends on no shapes.
    """
    products = max(one.flops_float32 for one in same)
    attention = max(one.flops_float32 * one.attention_share for one in same)
    few = max(one.flops_float32 * one.few_rows_share for one in same)
    few_attention = max(
        one.flops_float32 * one.attention_share * one.few_rows_attention_share for one in same
    )
    return replace(
        same[0],
        flops=max(one.flops for one in same),
        flops_float32=products,
        attention_share=attention / products,
        few_rows_share=few / products,
        few_rows_attention_share=few_attention / attention,
        bandwidth=max(one.bandwidth for one in everything),
        fresh_bandwidth=max(one.fresh_bandwidth for one in everything),
        host_seconds_per_layer=min(one.host_seconds_per_layer for one in everything),
        host_seconds_per_pass=min(one.host_seconds_per_pass for one in everything),
    )


class Running:
    """A training run that goes on by one step at a time, with the seconds of each stage."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.module = build(case)
        self.prompts = next(iter(loader(case)))
        self.times: dict[str, list[float]] = {name: [] for name in STAGES}
        for name, method in STAGES.items():
            self._time(name, method)
        self.case = case

    def _time(self, name: str, method: str) -> None:
        inner = getattr(self.module, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.times[name].append(time.process_time() - start)

        setattr(self.module, method, timed)

    def step(self) -> None:
        """Train for another rollout step, with a trainer of its own."""
        steps = self.module.update.optimizer_steps
        make_trainer(max_steps=steps).fit(self.module, loader(self.case))

    def ratio(self, name: str, other: Running, of_other: str) -> float:
        """Return the median ratio to the time of another stage, of steps taken beside each other.

        The first ones are left out. Both are as slow as the machine is at that moment, while the
        shortest times of two training runs may come from moments of unlike load.
        """
        pairs = zip(self.times[name][1:], other.times[of_other][1:], strict=True)
        return median(mine / theirs for mine, theirs in pairs)


def take_turns(running: Sequence[Running], rounds: int) -> None:
    """Take steps of all trainings in turns, in a reversed order every other time."""
    for number in range(rounds):
        for one in running if number % 2 else reversed(running):
            one.step()


def measure_in_turns(cases: list[dict[str, Any]], rounds: int) -> list[Running]:
    """Start trainings and take this many steps of each in turns, after a first one."""
    running = [Running(case) for case in cases]
    take_turns(running, rounds + 1)
    return running


def measure_memory(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Return predicted and measured peaks in bytes of each case, one after another in a process.

    With several ranks it has others beside it, and the measured ones are those of the first.
    """
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # so that the process gives freed tensors back
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, __file__, json.dumps(cases)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith(FOUND)]
    return json.loads(lines[-1].removeprefix(FOUND))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _measured(case: dict[str, Any]) -> dict[str, int]:
    """Return the bytes above the start: after loading, after a step, and the peak of each stage."""
    module, base, found = build(case, ShortAtFirst()), _status("VmRSS"), {}
    stages = {"load": "configure_model", "sampling": "collect", "update": "take_optimizer_steps"}

    def watch(name: str, method: str) -> None:
        inner = getattr(module, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            found[f"before {name}"] = _status("VmRSS") - base
            try:
                return inner(*args, **kwargs)
            finally:
                found[name] = _status("VmHWM") - base
                found[f"after {name}"] = _status("VmRSS") - base

        setattr(module, method, watched)

    for name, method in stages.items():
        watch(name, method)
    ranks, strategy = case.get("ranks", 1), case.get("strategy", "auto")
    num_steps = case["steps"] * module.update.optimizer_steps
    trainer = make_trainer(max_steps=num_steps, devices=ranks, strategy=strategy)
    trainer.fit(module, datamodule=OfRank(case))
    return found


def measure(case: dict[str, Any]) -> dict[str, Any]:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
    _measured(case | {"shape": small, "completion": 4})  # loads what every training run loads
    gc.collect()
    gc.freeze()  # so that collections between the stages do not look at all that is imported
    measured = _measured(case)
    plan = estimate_memory(setup_of(case, CPU), MemoryPart(name="libraries", bytes=0))
    parts = {one.name: one.bytes for one in plan.parts}
    during = {moment: plan.during(moment) for moment in plan.moments}
    kept = [one.bytes for one in plan.parts if one.is_there(SAMPLING) and one.is_there(SAVING)]
    return {"measured": measured, "parts": parts, "during": during, "kept": sum(kept)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [measure(case) for case in json.loads(sys.argv[1])]
    if get_rank() == 0:
        print(FOUND + json.dumps(results))
