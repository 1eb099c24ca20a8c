"""Find out when the SLURM job of a run ends, and queue it again."""

from __future__ import annotations

import logging
import os
import subprocess

log = logging.getLogger(__name__)

SCONTROL_SECONDS = 60.0


def job_end_time() -> float | None:
    """Return when the job ends, in seconds since the epoch; None if that is not known.

    SLURM tells it since release 22.05.
    """
    try:
        return float(os.environ["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None


def job_id() -> str | None:
    """Return the id of the job, or of the task of an array; None outside SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def requeue_job() -> None:
    """Queue the job again; SLURM then ends what is left of it.

    A failure is logged, since the run is over and its checkpoint is written.
    """
    job = job_id()
    if job is None:
        log.warning("The job is not queued again: SLURM_JOB_ID is not set.")
        return
    log.info("Queueing job %s again.", job)  # before SLURM ends this process
    try:
        subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            timeout=SCONTROL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        log.warning("Job %s could not be queued again: %s", job, why)
