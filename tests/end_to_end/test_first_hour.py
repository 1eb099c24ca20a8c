"""What a new user does first, from outside: the real command, in an empty directory."""

from __future__ import annotations

import os
import re
import signal
import time

import pandas as pd
import pytest
from paths import SUPPORT
from processes import LIT_GRPO, can_run, run_program, running
from transformers import AutoModelForCausalLM

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.runs.files.events import read_events
from lit_grpo.stopping import ExitCode

# Namespaces, where the system allows them to be made: one without a network, one with a small disk.
OFFLINE = ["unshare", "--map-root-user", "--net"]
SMALL_DISK = [
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=8m tmpfs disk && "$@"; code=$?; cp -r disk/run kept; exit $code',
    "sh",
]


OFTEN = """
trainer:
  callbacks+:
    - class_path: ModelCheckpoint
      init_args:
        dirpath: ${run_dir}/checkpoints
        filename: step={step}
        auto_insert_metric_name: false
        every_n_train_steps: 2
        save_top_k: -1
        save_last: true
"""


RUN = "runs/debug/0"


@pytest.mark.slow
def test_the_debug_config_runs_every_part_without_a_network(tmp_path):
    within = OFFLINE if can_run([*OFFLINE, "true"]) else []
    result = run_program([*within, *LIT_GRPO, "fit", "--config", "debug"], tmp_path)
    run_dir = tmp_path / "runs" / "debug" / "0"
    metrics = pd.read_csv(run_dir / "metrics.csv")
    assert metrics["step"].tolist() == [-1, *range(20)]
    assert metrics["policy/kl"][1:].notna().all()
    assert metrics["reward/digit/mean"].between(0, 1, inclusive="neither").any()
    assert metrics["val/accuracy"].notna().sum() >= 2
    assert len(list((run_dir / "completions").iterdir())) == 20
    assert (run_dir / "checkpoints" / "last.ckpt").exists()
    AutoModelForCausalLM.from_pretrained(run_dir / "final")
    assert "WARNING" not in (run_dir / "run.log").read_text()
    assert "Warning" not in result.stderr
    assert "make it async" not in result.stderr.lower()
    assert result.stderr.splitlines()[-1] == f"Curves and a summary: lit-grpo report {RUN}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quickstart_that_goes_well_gives_no_advice(tmp_path):
    """The commands of `scripts/quickstart`, in full."""
    words = {
        "warm_up": ["sft", "--config", "quickstart_sft", "--run_dir", "warm_up"],
        "run": ["fit", "--config", "quickstart", "--run_dir", "run"],
        "": ["report", "warm_up", "run"],
    }
    words["run"] += ["--model.policy.path", "warm_up/final"]
    for name, command in words.items():
        result = run_program([*LIT_GRPO, *command], tmp_path)
        shown = result.stdout + result.stderr
        assert [one.name for one in CAUSES.values() if one.remedy and one.remedy in shown] == []
        if name:
            assert "WARNING" not in (tmp_path / name / "run.log").read_text()
            assert not [one for one in read_events(tmp_path / name) if one.kind == "warning"]
    accuracies = pd.read_csv(tmp_path / "run" / "metrics.csv")["val/accuracy"].dropna()
    assert accuracies.iloc[-1] > 0.9


@pytest.mark.slow
def test_ctrl_c_says_why_it_ended_and_how_to_resume_and_that_command_does(tmp_path, importer):
    """The config names no callback that writes a checkpoint."""
    words = ["fit", "--config", "debug", "--trainer.max_steps", "8"]
    words += ["--trainer.callbacks=[{class_path: holds.HoldRun, init_args: {step: 2}}]"]
    with running([*LIT_GRPO, *words], tmp_path, PYTHONPATH=str(SUPPORT)) as process:
        while process.poll() is None and not (tmp_path / RUN / "metrics.csv").exists():
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        (tmp_path / "go").touch()
        _, shown = process.communicate(timeout=240)
    assert process.returncode == ExitCode.INTERRUPTED, shown
    resume = re.search(r"Resume after \d steps? with: (.*)", shown.splitlines()[-1])[1]
    assert resume == f"lit-grpo fit {RUN}"
    log = (tmp_path / RUN / "run.log").read_text()
    assert "Ended by SIGINT after" in log
    assert f" with: {resume}" in log
    importer.run(resume.split()[1:], tmp_path)
    assert "max_steps is reached" in (tmp_path / "said.txt").read_text()
    assert pd.read_csv(tmp_path / RUN / "metrics.csv")["step"].tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.slow
def test_checkpoints_of_lightning_print_no_advice_on_manual_optimization(tmp_path, importer):
    (tmp_path / "often.yaml").write_text(OFTEN)
    words = ["fit", "--config", "debug", "--config", "often.yaml", "--trainer.max_steps", "4"]
    importer.run(words, tmp_path)
    said = (tmp_path / "said.txt").read_text()
    assert "done after optimizer step 4" in said
    assert "saved_models" not in said
    assert "Warning" not in said
    saved = tmp_path / "runs/debug-often/0/checkpoints"
    assert sorted(one.name for one in saved.glob("step=*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_goes_on_elsewhere(tmp_path, importer):
    (tmp_path / "disk").mkdir()
    if not can_run(["unshare", "--map-root-user", "--mount", "true"]):
        pytest.skip("this system makes no namespaces for users")
    (tmp_path / "often.yaml").write_text(OFTEN)
    words = ["--config", "debug", "--config", "often.yaml", "--run_dir", "disk/run"]
    words += ["--trainer.max_steps", "8"]
    result = run_program([*SMALL_DISK, *LIT_GRPO, "fit", *words], tmp_path, exit_code=1)
    assert "error: the disk is full" in result.stderr.splitlines()[-1]
    assert re.search(r"Resume after \d steps? with: lit-grpo fit disk/run", result.stderr)
    assert "Traceback" not in result.stderr
    done = len(pd.read_csv(tmp_path / "kept" / "metrics.csv"))
    (tmp_path / "kept").rename(tmp_path / "disk" / "run")
    importer.run(["fit", "disk/run"], tmp_path)
    assert 0 < done < len(pd.read_csv(tmp_path / "disk" / "run" / "metrics.csv")) == 5
