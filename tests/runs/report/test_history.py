from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from logged_runs import write_run

from lit_grpo.runs.files.event_log import Event, append_event
from lit_grpo.runs.report.history import are_stages, load_runs
from lit_grpo.types import UserError


def make_run(path: Path, policy: str | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text("step,seconds\n0,1.0\n")
    if policy is not None:
        (path / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": {"path": policy}}}))
    return path


@pytest.mark.parametrize(
    "policy", ["runs/sft/0/final", "{root}/runs/sft/0/final", "../{root.name}/runs/sft/0"]
)
def test_a_run_started_from_the_run_where_its_policy_lies(tmp_path, policy):
    sft = make_run(tmp_path / "runs" / "sft" / "0")
    grpo = make_run(tmp_path / "runs" / "grpo" / "0", policy.format(root=tmp_path))
    runs = load_runs([grpo, sft])
    assert [run.path for run in runs] == [sft, grpo]
    assert runs[1].started_from is runs[0]
    assert are_stages(runs)


def test_a_relative_policy_counts_from_where_the_report_is_made_too(tmp_path, monkeypatch):
    sft, grpo = make_run(tmp_path / "a" / "0"), make_run(tmp_path / "b" / "0", "0/final")
    monkeypatch.chdir(tmp_path / "a")
    assert are_stages(load_runs([sft, grpo]))


def test_a_run_without_a_config_names_its_policy_in_its_start(tmp_path):
    sft = make_run(tmp_path / "elsewhere" / "sft" / "0")
    grpo = make_run(tmp_path / "runs" / "grpo" / "0")
    start = {"time": "", "step": 0, "kind": "start", "policy": "sft/0/final"}
    event = Event(**start, directory=str(tmp_path / "elsewhere"))
    append_event(grpo, event)
    assert are_stages(load_runs([grpo, sft]))


@pytest.mark.parametrize("policy", [None, "Qwen/Qwen2.5-0.5B", "runs/sft/1/final", "runs/sft/00"])
def test_other_runs_are_not_stages(tmp_path, policy):
    sft = make_run(tmp_path / "runs" / "sft" / "0")
    grpo = make_run(tmp_path / "runs" / "grpo" / "0", policy)
    assert not are_stages(load_runs([sft, grpo]))


def test_runs_that_started_from_each_other_end_the_search(tmp_path):
    first = make_run(tmp_path / "a" / "0", "b/0/final")
    second = make_run(tmp_path / "b" / "0", "a/0/final")
    assert {run.label for run in load_runs([first, second])} == {"a/0", "b/0"}


def test_a_run_given_twice_is_read_once(tmp_path):
    run = make_run(tmp_path / "a" / "0")
    assert len(load_runs([run, run / ".." / "0"])) == 1


def test_labels_are_as_long_as_is_needed_to_tell_runs_apart(tmp_path):
    paths = [make_run(tmp_path / name / "my" / "0") for name in ("mine", "theirs")]
    assert [run.label for run in load_runs(paths)] == ["mine/my/0", "theirs/my/0"]
    assert load_runs(paths[:1])[0].label == "my/0"


@pytest.mark.parametrize(
    ("accuracies", "steps"),
    [
        ([0.1, None, None, 0.4], [0, 3]),
        ([0.1, None, None, None], [0]),
        ([0.1, 0.2, 0.3, 0.4], [0, 1, 2, 3]),
        ([None, 0.2, None, 0.4], [1, 3]),
        ([0.1, 0.2], [0, 1]),
    ],
)
def test_a_validation_before_training_is_at_step_0(tmp_path, accuracies, steps):
    num_steps = len(accuracies) - 1
    rewards = [None, *[0.5] * num_steps]
    metrics = {"val/accuracy": accuracies, "reward/mean": rewards}
    (run,) = load_runs([write_run(tmp_path / "run", metrics, first_step=-1)])
    assert list(run.values("val/accuracy").index) == steps
    assert list(run.values("reward/mean").index) == list(range(1, num_steps + 1))
    assert run.num_steps == num_steps
    assert run.when("val/accuracy") == ("before training" if steps == [0] else "")


def test_a_run_that_ended_between_its_first_validation_and_step_has_no_step(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "run", {"val/accuracy": [0.25]}, first_step=-1)])
    assert run.num_steps == 0
    assert list(run.values("val/accuracy").index) == [0]


@pytest.mark.parametrize(
    "damaged",
    [
        b"seconds,loss\n1.0,2.0\n",
        b"step,loss\n1,2.0\n",
        b"step,seconds\n,1.0\n",
        b"step,seconds\nx,1.0\n",
        b"\n1,2\n",
        b"\xff\xfe\x00",
        b'step,seconds\n0,"1.0\n',
    ],
)
def test_damaged_metrics_are_refused_in_one_line(tmp_path, damaged):
    path = make_run(tmp_path / "run")
    (path / "metrics.csv").write_bytes(damaged)
    with pytest.raises(UserError, match=r"metrics\.csv is damaged, or was not written by a run"):
        load_runs([path])
