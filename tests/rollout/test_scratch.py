"""A scratch directory is gone after its owner, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from worker_processes import is_alive, wait_until

from lit_grpo.rollout import scratch as scratch_module
from lit_grpo.rollout.scratch import ScratchDirectory

OWNER = """
import runpy, sys, time
module = runpy.run_path(sys.argv[1])
scratch = module["ScratchDirectory"]("lit-grpo-test-")
(scratch.path / "model").mkdir()
(scratch.path / "model" / "weights").write_text("large")
print(scratch.path, flush=True)
time.sleep(600)
"""


def test_it_is_deleted_when_its_owner_is_killed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, scratch_module.__file__],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    path = Path(owner.stdout.readline().decode().strip())
    assert path.parent == tmp_path
    assert path.exists()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()
    wait_until(lambda: not path.exists())


def test_it_is_gone_when_it_is_removed_and_its_process_too():
    scratch = ScratchDirectory("lit-grpo-test-")
    (scratch.path / "file").write_text("")
    scratch.remove()
    assert not scratch.path.exists()
    assert not is_alive(scratch._remover.pid)


def test_it_can_be_kept():
    scratch = ScratchDirectory("lit-grpo-test-")
    scratch.keep()
    assert not is_alive(scratch._remover.pid)
    scratch.path.rmdir()
