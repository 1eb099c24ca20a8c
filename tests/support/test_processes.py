"""Programs that do not end in time are killed with all that they started."""

from subprocess import TimeoutExpired

import pytest
from processes import run_program
from worker_processes import is_alive, wait_until


def test_a_timeout_ends_the_children_of_a_program_too(tmp_path):
    script = "sleep 600 & echo $! > child.txt; wait"
    with pytest.raises(TimeoutExpired):
        run_program(["sh", "-c", script], tmp_path, seconds=5)
    child = int((tmp_path / "child.txt").read_text())
    wait_until(lambda: not is_alive(child))


def test_an_unexpected_exit_code_shows_what_a_program_said():
    with pytest.raises(AssertionError, match="to stdout(?s:.*)to stderr"):
        run_program(["sh", "-c", "echo to stdout; echo to stderr >&2; exit 3"])
    assert run_program(["sh", "-c", "exit 3"], exit_code=3).returncode == 3
