"""Two processes never have the same claim, and a killed one has none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time

from forked import receive, run_in_processes, start_process

from lit_grpo.cli.precompute.claims import Claims


def test_a_claim_is_held_until_it_is_released_by_one_process_only(tmp_path):
    claims = Claims(tmp_path / "new")
    assert claims.take("a")
    assert not claims.take("a")

    def take_both():
        other = Claims(tmp_path / "new")
        return [other.take("a"), other.take("b")]

    assert run_in_processes(take_both) == [[False, True]]
    claims.release("a")
    assert run_in_processes(take_both) == [[True, True]]
    assert claims.take("a")
    claims.close()


def test_a_kill_frees_what_was_claimed(tmp_path):
    def take_and_wait(sender):
        claims = Claims(tmp_path)
        sender.send(claims.take("a"))
        time.sleep(600)

    process, told = start_process(take_and_wait)
    assert receive(told)
    claims = Claims(tmp_path)
    assert not claims.take("a")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert claims.take("a")
    claims.close()


def test_without_locks_every_claim_is_granted(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    claims = Claims(tmp_path)
    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert claims.take("a")
    claims.release("a")
    assert claims.take("a")
    claims.close()
