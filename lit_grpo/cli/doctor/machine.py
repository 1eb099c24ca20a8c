"""Find out what this machine has: memory, programs and versions of packages."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.doctor.findings import Finding, failed, ok, remark
from lit_grpo.rollout import VLLMEngine
from lit_grpo.rollout.server.engine import ServedEngine

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHOWN = ("torch", "lightning", "transformers", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that the trainer's weights and activations are in."""

    name: str
    total: int
    """Bytes."""
    available: int
    is_gpu: bool


def trainer_memory(device: torch.device) -> Memory:
    """Return the memory of the trainer's GPU, or else of the machine or its container."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Memory(name=name, total=total, available=available, is_gpu=True)
    host = psutil.virtual_memory()
    own = psutil.Process().memory_info().rss  # this process ends before the run starts
    total = min([host.total, *_container_limit()])
    available = min(total, host.available + own)
    return Memory(name="memory", total=total, available=available, is_gpu=False)


def _container_limit() -> list[int]:
    """Return the limit of the container that this process runs in, if it has one."""
    try:
        return [int(CGROUP_LIMIT.read_text())]
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return []


def check_versions(run: BuiltRun) -> Iterator[Finding]:
    """List the versions that matter, and those that this package does not work with."""
    found = {"lit-grpo": metadata.version("lit-grpo"), "python": platform.python_version()}
    found |= {name: metadata.version(name) for name in (*SHOWN, *_engine_packages(run))
              if _is_installed(name)}  # fmt: skip
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    cuda = torch.version.cuda
    yield ok(f"{listed}, {f'CUDA {cuda}' if cuda else 'no CUDA: torch is a build for CPUs'}")
    for requirement, version in unmet_requirements():
        yield failed(
            f"{requirement.name} must be {requirement.specifier}, got {version}.",
            f"Install it with: pip install '{requirement}'",
        )
    yield from _devices(run)


def _devices(run: BuiltRun) -> Iterator[Finding]:
    device = run.trainer.strategy.root_device
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        yield ok(f"GPUs: {', '.join(names)}.")
    elif shutil.which("nvidia-smi") and not torch.cuda.is_available():
        yield remark(
            "The run uses the CPU, although this machine has nvidia-smi: torch finds no GPU. "
            "Install a build of torch for the driver's CUDA version, see Install in the README."
        )
    else:
        num_threads = torch.get_num_threads()
        threads = f"{num_threads} thread{'' if num_threads == 1 else 's'}"
        yield ok(f"The run uses the {device.type.upper()}; {threads}.")


def _engine_packages(run: BuiltRun) -> list[str]:
    """Return the package of an engine in this environment."""
    engine = run.module.engine
    return [package_of(engine)] if isinstance(engine, VLLMEngine | ServedEngine) else []


def package_of(engine: VLLMEngine | ServedEngine) -> str:
    """Return the package that has the server or the engine itself; empty if it is not known."""
    return "vllm" if isinstance(engine, VLLMEngine) else engine.api.package


def _is_installed(name: str) -> bool:
    try:
        return bool(name and metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def unmet_requirements() -> list[tuple[Requirement, str]]:
    """Return the requirements of this package that the environment does not meet."""
    required = map(Requirement, metadata.requires("lit-grpo") or ())
    needed = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions = [
        (one, metadata.version(one.name) if _is_installed(one.name) else "none") for one in needed
    ]
    return [
        (one, version)
        for one, version in versions
        if version == "none" or not one.specifier.contains(version, prereleases=True)
    ]
