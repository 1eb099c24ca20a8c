"""What the objects of a command line make of a setup: passes, samplers, teachers and scores."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from doctor_runs import engine, read_run, rewarded
from tiny import tiny_policy

from lit_grpo.cli.estimate.config import count_scores, setup_of
from lit_grpo.cli.estimate.devices import DEVICES, Cluster
from lit_grpo.cli.estimate.setup import Sampler, Setup


@pytest.fixture(autouse=True)
def here(here) -> Path:
    (here / "base.yaml").write_text(yaml.safe_dump(BASE))
    return here


def setup(*arguments: str, precision: object = "32-true", **settings) -> Setup:
    cluster = Cluster(device=DEVICES["H100"])
    subject = read_run(*arguments)
    return setup_of(subject, cluster, strategy="auto", precision=precision, **settings)


@pytest.mark.parametrize(
    ("arguments", "reference", "old"),
    [
        ([], 0, 0),
        (["--model.objective.kl.coef=0.1"], 1, 0),
        (["--model.objective.kl={coef: 0.1, place: reward}"], 1, 1),
        (["--model.update.epochs=2"], 0, 1),
        (["--model.update.epochs=2", "--model.objective.old_logprobs=sampler"], 0, 0),
        (["--model.objective.top_entropy_fraction=0.5"], 0, 1),
    ],
)
def test_passes_before_the_update_are_those_that_the_objective_needs(arguments, reference, old):
    found = setup(*arguments)
    assert (found.reference_passes, found.old_passes) == (reference, old)
    assert bool(found.reference_bytes) == bool(reference)


@pytest.mark.parametrize(
    ("arguments", "precision", "expected"),
    [
        (
            [engine("HFEngine", max_concurrent=5)],
            "32-true",
            Sampler(max_concurrent=5, value_bytes=4),
        ),
        (
            ["--model.sampling.top_p=0.9"],
            "bf16-mixed",
            Sampler(value_bytes=2, sorts=True),
        ),
        (
            [engine("VLLMEngine", memory_fraction=0.3, sleep=False, dtype="bfloat16")],
            "32-true",
            Sampler(kind="vllm", max_concurrent=256, memory_fraction=0.3),
        ),
    ],
)
def test_a_sampler_on_the_trainer_s_gpu_has_the_settings_of_its_engine(
    arguments, precision, expected
):
    assert setup(*arguments, precision=precision).sampler == expected


URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("settings", "gpus", "num_gpus", "per_copy", "fraction"),
    [
        ({"urls": URLS}, ["0"], 2, 1, 0.0),
        ({"launch": {}}, ["0"], 1, 1, 0.9),  # it may be on any GPU
        ({"launch": {"devices": ["0"], "memory_fraction": 0.4}}, ["0"], 1, 1, 0.4),
        ({"launch": {"devices": ["1"], "memory_fraction": 0.4}}, ["0"], 1, 1, 0.0),
        (
            {"launch": {"num_servers": 2, "devices": ["2,3", "4,5"], "tensor_parallel_size": 2}},
            ["0", "1"], 4, 2, 0.0,
        ),
    ],
)  # fmt: skip
def test_servers_have_gpus_of_their_own_unless_they_may_share_the_trainer_s(
    settings, gpus, num_gpus, per_copy, fraction
):
    found = setup(engine("VLLMServerEngine", **settings), gpus=gpus).sampler
    assert (found.kind, found.transfer) == ("servers", "disk")
    assert (found.num_gpus, found.gpus_per_copy) == (num_gpus, per_copy)
    assert found.memory_fraction == fraction


def test_a_teacher_in_the_trainer_s_memory_has_its_weights(here):
    tiny_policy().save_pretrained(here / "teacher")
    teacher = ["--model.teacher.path=teacher", "--model.objective.distillation.coef=0.1"]
    found = setup(*teacher)
    assert found.teacher_parameters == found.model.parameters
    assert found.teacher_bytes - 4 * found.teacher_parameters in range(200)  # buffers


def test_the_time_of_scores_is_known_if_all_follow_rules():
    rules = "--model.rewards=[MathReward, {class_path: FormatReward, init_args: {pattern: x}}]"
    assert count_scores(read_run(rules), 8) == 2 * 8
    assert count_scores(read_run(rewarded("code_rewards.RunCode")), 8) is None


def test_a_warm_up_samples_and_scores_nothing(here):
    model = {"policy": BASE["model"]["policy"]}
    (here / "base.yaml").write_text(yaml.safe_dump(BASE | {"model": model}))
    subject = read_run()
    assert count_scores(subject, 8) == 0
    found = setup()
    assert (found.sampler, found.old_passes) == (Sampler(kind="none"), 0)
