"""Run the real command with a real terminal as its screen."""

from __future__ import annotations

import os
import pty
import re
import termios
from pathlib import Path

from forked_ranks import Importer


def shown_in_terminal(
    importer: Importer, *arguments: str, cwd: Path, columns: int = 100
) -> list[str]:
    """Return all lines that ``lit-grpo`` writes on a terminal, without control sequences.

    What it has written so far is in the file ``screen`` in its working directory.
    """
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, columns))
    process = importer.start(arguments, cwd, Path(os.ttyname(terminal)), TERM="xterm")
    os.close(terminal)
    written = bytearray()
    try:
        with (cwd / "screen").open("wb", buffering=0) as seen:
            while part := _read(screen):
                written += part
                seen.write(part)
        assert process.wait(timeout=200) == 0, written.decode()
    finally:
        process.kill_group()
        os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return re.split(r"[\r\n]+|(?=Training|Validation)", text)


def _read(screen: int) -> bytes:
    """Return what was written, or nothing once no process has the terminal open."""
    try:
        return os.read(screen, 65536)
    except OSError:
        return b""
