"""End forked processes at one of their calls that change or open files, to try every moment."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "ctypes.dlsym")
"""Audit events; the last stands for a call of C."""


def killed_at(moment: int, function: Callable[[], object]) -> bool:
    """Call a function in a process that is killed just before its call of this number.

    Return False if the function ended before there was such a call.
    """
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), "the function raised an exception"
        return code != 0
    try:
        left = [moment]

        def audit(event: str, arguments: object) -> None:
            if event in EVENTS:
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

        sys.addaudithook(audit)
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
