"""What a run says of a policy that is gathered to sample."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from small_runs import fit, make_module
from tiny import tiny_policy

from lit_grpo.policy.sharding import Sharding
from lit_grpo.rollout import HFEngine
from lit_grpo.training.checks import gathered_weights
from lit_grpo.training.checks.gathered_weights import report_gathering

GIB = 2**30


def policy_that_gathers(size: int) -> SimpleNamespace:
    sharding = SimpleNamespace(gathered_bytes=lambda model: size)
    return SimpleNamespace(model=tiny_policy().model, sharding=sharding)


def on_a_gpu_with(monkeypatch, *, free: int, reserved: int, allocated: int) -> None:
    monkeypatch.setattr(gathered_weights, "compute_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def test_a_policy_that_is_whole_on_every_rank_is_not_spoken_of(caplog):
    caplog.set_level("INFO", "lit_grpo")
    report_gathering(tiny_policy())
    assert caplog.messages == []


@pytest.mark.parametrize(("allocated", "warns"), [(4 * GIB, False), (6 * GIB, True)])
def test_a_gpu_without_room_for_the_whole_policy_is_warned_of(
    allocated, warns, monkeypatch, caplog
):
    caplog.set_level("INFO", "lit_grpo")
    on_a_gpu_with(monkeypatch, free=10 * GIB, reserved=9 * GIB, allocated=allocated)
    report_gathering(policy_that_gathers(14 * GIB))
    said, *warned = caplog.messages
    assert "14 GiB in addition to its own part. Servers need no such copy" in said
    assert [line[:58] for line in warned] == warns * [
        "the whole policy has 14 GiB, and only 13 GiB are free on t"
    ]


@pytest.mark.parametrize("samples", [True, False])
def test_a_run_whose_policy_samples_says_so_once(samples, monkeypatch, caplog):
    caplog.set_level("INFO", "lit_grpo")
    monkeypatch.setattr(Sharding, "gathered_bytes", lambda self, model: 3 * GIB)
    monkeypatch.setattr(HFEngine, "samples_with_policy", samples)
    fit(make_module(), max_steps=2)
    said = [line for line in caplog.messages if "gathers all of its weights, 3 GiB" in line]
    assert len(said) == samples
