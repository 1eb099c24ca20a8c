"""What an engine and a teacher take of a GPU, on a machine that is said to have one."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from cli_base import BASE
from tiny import tiny_policy

from lit_grpo.__main__ import main
from lit_grpo.cli.doctor import estimate
from lit_grpo.cli.doctor.estimate import Estimate, Part, _merges, gib
from lit_grpo.cli.doctor.machine import GIB, Memory


@pytest.fixture
def memory(here, monkeypatch, capsys):
    """The lines of the memory check for an engine on a GPU of 80 GiB, of which some are free."""
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))

    def check(*arguments: str, free: int = 80) -> str:
        gpu = Memory(name="A GPU", total=80 * GIB, available=free * GIB, is_gpu=True)
        monkeypatch.setattr(estimate, "trainer_memory", lambda device: gpu)
        main(["doctor", "--config=base.yaml", "--offline", *arguments])
        shown = " ".join(capsys.readouterr().out.split())
        return re.search(r"(ok|remark|failed) memory .*? disk ", shown)[0]

    return check


def engine(kind: str, **settings) -> str:
    return f"--model.engine={json.dumps({'class_path': kind, 'init_args': settings})}"


def test_the_policy_s_own_sampling_needs_its_cache_only(memory):
    shown = memory()
    assert "of the 80 GiB of A GPU are free" in shown
    assert "always: CUDA 512 MiB, weights 137 KiB" in shown
    assert "keys and values" in shown


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (engine("VLLMEngine", memory_fraction=0.5), "while sampling: vLLM 40 GiB"),
        (engine("VLLMEngine", memory_fraction=0.5, sleep=False), "vLLM 40 GiB in the update"),
        (engine("VLLMServerEngine", launch={"memory_fraction": 0.25}), "server 20 GiB"),
        (engine("SGLangEngine", launch={}), "server 72 GiB"),
    ],
)
def test_an_engine_on_the_trainer_s_gpu_takes_its_share(settings, expected, memory):
    assert expected in re.sub(r" ok ", " ", memory(settings))


@pytest.mark.parametrize(
    "where", [{"launch": {"devices": ["1"]}}, {"urls": ["http://127.0.0.1:1"]}]
)
def test_a_server_elsewhere_takes_nothing(where, memory):
    assert "server" not in memory(engine("VLLMServerEngine", **where))


def test_too_large_a_share_is_failed_with_its_setting(memory):
    shown = memory(engine("VLLMServerEngine", launch={"memory_fraction": 0.9}), free=60)
    assert shown.startswith("failed memory Needs at most about 72.5 GiB")
    assert "To save memory, lower model.engine.init_args.launch.memory_fraction" in shown
    close = memory(engine("VLLMServerEngine", launch={"memory_fraction": 0.9}), free=80)
    assert close.startswith("remark memory")


def test_a_teacher_and_a_reference_have_their_weights(memory, here):
    tiny_policy().save_pretrained(here / "teacher")
    teacher = ["--model.teacher.path=teacher", "--model.objective.distillation.coef=0.1"]
    shown = memory(*teacher, "--model.objective.kl.coef=0.1")
    assert "reference 137 KiB, teacher 137 KiB" in shown


def test_mixed_precision_keeps_copies_of_the_weights(memory):
    shown = memory("--trainer.precision=bf16-mixed")
    assert "weights in bfloat16 68.6 KiB" in shown
    checkpointing = memory(
        "--trainer.precision=bf16-mixed", "--model.policy.gradient_checkpointing=true"
    )
    assert "weights in bfloat16 34.3 KiB" in checkpointing


def test_the_peak_is_that_of_the_worst_moment_and_so_is_the_advice():
    found = Estimate(
        (
            Part(name="weights", bytes=5, advice="a"),
            Part(name="activations", bytes=3, when="update", advice="b"),
            Part(name="keys and values", bytes=4, when="sampling", advice="c"),
        )
    )
    assert found.peak == 9
    assert found.moments == ["sampling", "update"]
    assert found.advice() == ["a", "c"]
    assert Estimate(found.parts[:1]).moments == ["always"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [(2**30, "1 GiB"), (2000 * 2**30, "2,000 GiB"), (1020 * 2**20, "0.996 GiB"), (1536, "1.5 KiB")],
)
def test_sizes_have_three_digits(size, shown):
    assert gib(size) == shown


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"dtype": "float32", "precision": "bf16-mixed"}, True),
        ({"dtype": "float32"}, False),
        ({"device": "cpu"}, False),
        ({"packing": False}, False),
        ({"compile_forward": True}, False),
        ({"caps_scores": True}, False),
    ],
    ids=str,
)
def test_attention_on_a_gpu_in_16_bits_needs_no_masks(changed, expected):
    usual = {"dtype": "bfloat16", "packing": True, "compile_forward": False, "device": "cuda"}
    usual |= {"precision": "32-true", "caps_scores": False}
    chosen = SimpleNamespace(**usual | changed)
    strategy = SimpleNamespace(root_device=torch.device(chosen.device))
    subject = SimpleNamespace(
        module=SimpleNamespace(policy=chosen),
        trainer=SimpleNamespace(precision=chosen.precision, strategy=strategy),
    )
    assert _merges(subject, chosen) is expected
