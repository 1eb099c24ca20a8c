"""One process at a time trains in a run directory."""

import signal
import sys

import pytest
from processes import running

from lit_grpo.runs.files.lock import is_locked, locked
from lit_grpo.types import UserError

HOLD = """
import sys, time
from pathlib import Path
from lit_grpo.runs.files.lock import locked
with locked(Path("run")):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_directory_in_use_is_refused_until_its_process_has_ended(signum, tmp_path):
    with running([sys.executable, "-c", HOLD], tmp_path) as process:
        assert process.stdout.readline() == "held\n"
        refused = pytest.raises(UserError, match=f"in which process {process.pid} on .* trains")
        with refused, locked(tmp_path / "run"):
            pass
        assert is_locked(tmp_path / "run")
        process.send_signal(signum)
        process.wait(timeout=60)
        assert not is_locked(tmp_path / "run")
        with locked(tmp_path / "run"):
            assert (tmp_path / "run" / "run.lock").exists()
        assert not (tmp_path / "run" / "run.lock").exists()


def test_a_directory_that_cannot_be_written_is_left_to_the_run_log(tmp_path):
    (tmp_path / "run").write_text("a file")
    with locked(tmp_path / "run"):
        pass
