"""The SLURM job of a run, with a program in the place of ``scontrol``."""

import os

import pytest

from lit_grpo.runs.shutdown.slurm import job_end_time, job_id, requeue_job


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job 77; return a function that puts a shell script in the place of ``scontrol``."""
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def install(script: str) -> None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)

    return install


def test_the_job_is_queued_again_by_its_id(job, tmp_path, caplog):
    job(f"echo $@ > {tmp_path}/said")
    with caplog.at_level("INFO", logger="lit_grpo"):
        requeue_job()
    assert (tmp_path / "said").read_text() == "requeue 77\n"
    assert caplog.messages == ["Queueing job 77 again."]


def test_a_task_of_an_array_is_queued_again_by_itself(job, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_id() == "70_3"


def test_a_failure_is_logged_with_what_was_said(job, caplog):
    job("echo 'Requested operation is presently disabled' >&2; exit 1")
    requeue_job()
    assert "Job 77 could not be queued again: Requested operation is presently" in caplog.text


def test_without_the_program_or_a_job_nothing_is_queued(job, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    requeue_job()
    assert "No such file or directory: 'scontrol'" in caplog.text
    monkeypatch.delenv("SLURM_JOB_ID")
    requeue_job()
    assert "not queued again: SLURM_JOB_ID is not set" in caplog.text


@pytest.mark.parametrize(("value", "end"), [("1800000000", 1.8e9), ("", None), ("soon", None)])
def test_the_end_of_the_job_is_known_if_slurm_tells_it(value, end, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", value)
    assert job_end_time() == end
