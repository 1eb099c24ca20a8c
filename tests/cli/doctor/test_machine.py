"""What this machine has: its memory, and the versions of packages."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from lit_grpo.cli.doctor import machine
from lit_grpo.cli.doctor.machine import package_of, trainer_memory, unmet_requirements
from lit_grpo.rollout import Launch, SGLangEngine, VLLMEngine, VLLMServerEngine

TOTAL, FREE, OWN = 1000, 600, 100


@pytest.mark.parametrize(
    ("limit", "total", "available"),
    [
        ("max", TOTAL, FREE + OWN),
        ("800", 800, FREE + OWN),
        ("500", 500, 500),
        ("2000", TOTAL, FREE + OWN),
        (None, TOTAL, FREE + OWN),
    ],
)
def test_without_a_gpu_the_memory_is_that_of_the_machine_or_of_its_container(
    limit, total, available, tmp_path, monkeypatch
):
    if limit is not None:
        (tmp_path / "limit").write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "CGROUP_LIMIT", tmp_path / "limit")
    host, own = SimpleNamespace(total=TOTAL, available=FREE), SimpleNamespace(rss=OWN)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: own))
    found = trainer_memory(torch.device("cpu"))
    assert (found.total, found.available, found.is_gpu) == (total, available, False)


@pytest.mark.parametrize(
    ("required", "missing"),
    [
        ("torch", None),
        ("torch<1", torch.__version__),
        ("no-such-package>=2", "none"),
        ("no-such-package; extra == 'vllm'", None),
        ("no-such-package; python_version < '3'", None),
    ],
)
def test_a_requirement_is_unmet_without_its_package_or_in_another_version(
    required, missing, monkeypatch
):
    monkeypatch.setattr(machine.metadata, "requires", lambda name: ["pytest", required])
    expected = [] if missing is None else [(Requirement(required), missing)]
    assert unmet_requirements() == expected


def test_this_environment_meets_the_requirements():
    assert unmet_requirements() == []


def test_the_package_of_an_engine_is_the_one_that_has_its_server():
    assert package_of(VLLMEngine()) == "vllm"
    assert package_of(VLLMServerEngine(launch=Launch())) == "vllm"
    assert package_of(SGLangEngine(launch=Launch())) == "sglang"
