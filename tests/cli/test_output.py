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


def test_another_error_of_the_output_is_raised():
    with open("/dev/full", "w") as full:
        done = subprocess.run(HELP, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode != 0
    assert "No space left on device" in done.stderr
