"""A pipe or terminal that is closed while a command writes to it."""

import os
import pty
import subprocess
import sys

import pytest

HELP = [sys.executable, "-m", "lit_grpo", "--help"]
PRINT_LATER = """
import sys
from lit_grpo.cli.output import ignore_closed_output
ignore_closed_output()
sys.stdin.read()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
    print("and the end", file=stream)
sys.exit(7)
"""


@pytest.mark.parametrize("open_pair", [os.pipe, pty.openpty])
def test_a_program_goes_on_when_nobody_reads_its_output(open_pair):
    reader, writer = open_pair()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINT_LATER],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    os.close(reader)
    process.communicate(timeout=200)
    assert process.returncode == 7


def test_a_command_whose_output_is_cut_short_says_nothing_about_it():
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$@" | read -r', "bash", *HELP],
        capture_output=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_a_command_runs_without_the_outputs_that_the_shell_has_closed(closed):
    command = f'"$@" {closed}'
    done = subprocess.run(["bash", "-c", command, "bash", *HELP], capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")


def run_with_full_disk(*words: str) -> subprocess.CompletedProcess[str]:
    with open("/dev/full", "w") as full:
        return subprocess.run(
            [sys.executable, "-m", "lit_grpo", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        pytest.param(["fit", "--config", "debug", "--print_config"], marks=pytest.mark.slow),
    ],
)
def test_a_result_that_cannot_be_written_is_one_line_and_exit_code_1(words):
    done = run_with_full_disk(*words)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output could not be written (No space left on device). Free space where "
        "it goes, and repeat the command.\n",
    )


@pytest.mark.slow
def test_a_run_goes_on_when_its_output_cannot_be_written(tmp_path):
    few = ["--trainer.max_steps=1", "--model.evaluation.before_training=false"]
    done = run_with_full_disk("fit", "--config=debug", f"--run_dir={tmp_path}/run", *few)
    assert done.returncode == 0
    last = done.stderr.splitlines()[-1]
    assert last.endswith("but the run did not need it: its run.log has what was printed.")
    assert "done after optimizer step" in (tmp_path / "run" / "run.log").read_text()
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
