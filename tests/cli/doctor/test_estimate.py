"""What an engine and a teacher take of a GPU, on a machine that is said to have one."""

from __future__ import annotations

import re

import pytest
from doctor_runs import engine, rewarded
from tiny import LLAMA, tiny_policy
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_grpo.__main__ import main
from lit_grpo.cli.doctor import estimate
from lit_grpo.cli.doctor.machine import Memory
from lit_grpo.cli.estimate.devices import GIB

HOST = {"device": "cpu"}


@pytest.fixture
def memory(here, monkeypatch, capsys):
    """The lines of the memory check for an engine on a GPU of 80 GiB, of which some are free."""

    def check(*arguments: str, free: int = 80) -> str:
        gpu = Memory(name="A GPU", total=80 * GIB, available=free * GIB, is_gpu=True)
        monkeypatch.setattr(estimate, "trainer_memory", lambda device: gpu)
        main(["doctor", "--config=base.yaml", "--offline", *arguments])
        shown = " ".join(capsys.readouterr().out.split())
        return re.search(r"(ok|remark|failed) memory .*? disk ", shown)[0]

    return check


def test_the_policy_s_own_sampling_needs_its_cache_only(memory):
    shown = memory()
    assert "of the 80 GiB of A GPU are free" in shown
    assert "always: CUDA 512 MiB, weights 137 KiB" in shown
    assert "keys and values" in shown


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (engine("VLLMEngine", memory_fraction=0.5), "while sampling: vLLM 40 GiB"),
        (
            engine("VLLMEngine", memory_fraction=0.5, sleep=False),
            "vLLM 40 GiB except in the forward pass",
        ),
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


@pytest.mark.parametrize(
    ("settings", "size"), [({"dtype": "auto"}, 4.0), ({"dtype": "bfloat16"}, 2.0), (HOST, 0.0)]
)
def test_a_reward_model_on_the_trainer_s_gpu_has_its_weights_and_a_batch(
    settings, size, memory, here
):
    config = AutoConfig.for_model(**LLAMA | {"vocab_size": 2**15}, num_labels=1)
    scorer = AutoModelForSequenceClassification.from_config(config)
    scorer.save_pretrained(here / "scorer")
    num_parameters = sum(one.numel() for one in scorer.parameters())
    shown = memory(rewarded("ScorerReward", path="scorer", batch_size=2, **settings))
    found = re.search(r"reward models ([\d.]+) MiB", shown)
    assert (float(found[1]) if found else 0.0) == pytest.approx(
        size * num_parameters / 2**20, rel=0.01
    )
    assert ("a reward model's batch" in shown) == bool(size)


def test_mixed_precision_keeps_copies_of_the_weights(memory):
    shown = memory("--trainer.precision=bf16-mixed")
    assert "weights in bfloat16 68.6 KiB" in shown
    checkpointing = memory(
        "--trainer.precision=bf16-mixed", "--model.policy.gradient_checkpointing=true"
    )
    assert "weights in bfloat16 34.3 KiB" in checkpointing
