"""The command ``lit-grpo plan``: estimate a step, print it, and say whether it fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psutil
import torch

from lit_grpo.cli.built_run import BuiltRun, ReadOnce
from lit_grpo.cli.command_line import CommandLine
from lit_grpo.cli.doctor.hub import use_of_the_hub
from lit_grpo.cli.doctor.machine import trainer_memory
from lit_grpo.cli.estimate.calibration import measure_cpu
from lit_grpo.cli.estimate.config import count_scores, setup_of
from lit_grpo.cli.estimate.devices import CPU, DEVICES, Cluster, Device, device_of_gpu, parse_gpus
from lit_grpo.cli.estimate.memory import MemoryPart, estimate_memory
from lit_grpo.cli.estimate.model_sizes import ModelSizes, sizes_of
from lit_grpo.cli.estimate.seconds import estimate_seconds
from lit_grpo.cli.estimate.setup import Setup
from lit_grpo.cli.plan.remedies import ADAPTER, find_remedy
from lit_grpo.cli.plan.report import Plan, print_plan, to_json
from lit_grpo.data.loading.loader import check_sizes
from lit_grpo.policy.lora import LoRA
from lit_grpo.stopping import ExitCode
from lit_grpo.training.checks.compatibility import check_completions_fit
from lit_grpo.training.checks.trainer_features import refuse_automatic
from lit_grpo.types import UserError, check_range

DOES_NOT_FIT = 1
"""Exit code of ``plan`` if a step needs more memory than there is."""


def run_plan(cli: CommandLine) -> int:
    """Print the plan, and return 1 if it does not fit.

    Raises:
        UserError: the model cannot be read, a device is not known, or the run would be refused.
    """
    run = BuiltRun(cli)
    with use_of_the_hub(is_offline=run.is_offline):
        plan = make_plan(run)
    if cli.config.json:
        print(json.dumps(to_json(plan), indent=1))
    else:
        print_plan(plan)
    return ExitCode.DONE if plan.fits else DOES_NOT_FIT


def make_plan(run: BuiltRun) -> Plan:
    """Return the plan of a command line's run."""
    config: Any = run.cli.config
    check_range("nodes", config.nodes, at_least=1)
    check_range("completion_tokens", config.completion_tokens, above=0)
    check_range("optimizer_bytes", config.optimizer_bytes, at_least=0)
    outline = run.outline.read()
    per_node, name = _devices(config)
    device = _measured(run, sizes_of(outline)) if name == CPU else DEVICES[name]
    cluster = Cluster(device=device, per_node=per_node, num_nodes=config.nodes)
    _refuse_unfit(run, cluster)
    trainer: Any = run.cli.config_init.trainer
    make_setup = partial(
        setup_of,
        run,
        cluster,
        strategy=trainer.strategy,
        precision=trainer.precision,
        gpus=[str(number) for number in range(per_node)],
        optimizer_bytes=config.optimizer_bytes,
        mean_completion_tokens=config.completion_tokens,
    )
    setup = make_setup()
    libraries = None
    if not device.is_gpu:
        rss = psutil.Process().memory_info().rss
        libraries = MemoryPart(name="Python and libraries", bytes=rss)
    memory, limit = estimate_memory(setup, libraries), limit_of(cluster)
    time = estimate_seconds(setup, count_scores(run, setup.step.num_rows))
    remedies = [] if memory.peak <= limit else _remedies(run, make_setup, limit, libraries)
    return Plan(
        setup=setup,
        memory=memory,
        limit=limit,
        remedies=remedies,
        time=time,
        assumed_prompt_tokens=None if run.prompts else setup.step.prompt_lengths[0],
        missing="prompts" if run.tokenizer.or_none() else "tokenizer",
    )


def _remedies(
    run: BuiltRun, make_setup: Callable[[], Setup], limit: int, fixed: MemoryPart | None
) -> list[str]:
    """Return what makes a step fit: with the weights that are trained, and with an adapter.

    The run is then one that trains an adapter.
    """
    found = [find_remedy(make_setup(), limit, fixed)]
    policy = run.module.policy
    if policy.lora is None:
        policy.lora, policy.dtype = LoRA(), "bfloat16"
        run.outline = ReadOnce("the model", policy.outline)
        with suppress(UserError):  # a model without layers that can be adapted
            found.append(find_remedy(make_setup(), limit, fixed, first=ADAPTER))
    return [one for one in found if one is not None]


def _refuse_unfit(run: BuiltRun, cluster: Cluster) -> None:
    """Check what a run on the cluster would be refused for, in addition to `make_setup`.

    Raises:
        UserError: it would be.
    """
    module, data, ranks = run.module, run.cli.datamodule, cluster.num_ranks
    refuse_automatic(run.trainer, module)
    if module.samples_in_training or run.val_prompts:
        check_completions_fit(run.positions, module.sampling)
    module.engine.check_processes(ranks, cluster.num_nodes)
    check_sizes(data.prompts_per_step, ranks, len(run.prompts) or None, training=True)
    if held_out := len(run.val_prompts):
        check_sizes(data.validation_batch_size, ranks, held_out, training=False)


def _devices(config: Any) -> tuple[int, str]:
    """Return the devices of a node and their name: as given, or of this machine."""
    if config.gpus is not None:
        return parse_gpus(config.gpus)
    if not torch.cuda.is_available():
        return max(1, _count(config.trainer.devices, 1)), CPU
    found = device_of_gpu(torch.cuda.get_device_name())
    return max(1, _count(config.trainer.devices, torch.cuda.device_count())), found.name


def _count(devices: Any, default: int) -> int:
    """Return how many devices ``trainer.devices`` names; -1 and auto are all."""
    if isinstance(devices, str) and "," in devices:
        return len([one for one in devices.split(",") if one])
    if isinstance(devices, list):
        return len(devices)
    number = int(devices) if str(devices).isdecimal() else 0
    return number or default


def _measured(run: BuiltRun, sizes: ModelSizes) -> Device:
    """Return this machine's CPU, timed with the rows and tokens that are sampled at a time."""
    num_tokens = run.grpo.sampling.max_tokens if run.grpo else 0
    return measure_cpu(sizes, _num_rows(run), num_tokens)


def _num_rows(run: BuiltRun) -> int:
    """Return the completions that are sampled at a time."""
    group = run.grpo.group_size if run.grpo else 1
    together: int = getattr(run.module.engine, "max_concurrent", 256)
    prompts: int = run.cli.datamodule.prompts_per_step
    return max(1, min(prompts * group, together))


def limit_of(cluster: Cluster) -> int:
    """Return the bytes that a rank may take."""
    if cluster.is_gpu:
        return round(ALLOCATED_SHARE * cluster.device.memory)
    memory: int = trainer_memory(torch.device("cpu")).total
    return memory // cluster.per_node


ALLOCATED_SHARE = 0.95
"""Share of a GPU's memory that can be used: the allocator of torch loses some to gaps."""
