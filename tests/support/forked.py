"""Run functions in forked processes, which start at once because everything is imported already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

FORK = multiprocessing.get_context("fork")


def run_in_processes(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a process of its own, at the same time, and return their results."""

    def sending(function: Callable[[], Any]) -> Callable[[Connection], None]:
        return lambda sender: sender.send(function())

    started = [start_process(sending(function)) for function in functions]
    try:
        return [receive(results) for _, results in started]
    finally:
        for process, _ in started:
            process.join(60)


def start_process(function: Callable[[Connection], None]) -> tuple[ForkProcess, Connection]:
    """Start a function with a connection to send to; return the process and the other end."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=function, args=(sender,))
    process.start()
    sender.close()
    return process, receiver


def receive(connection: Connection, seconds: float = 120) -> Any:
    """Return what a process sends; raise EOFError if it ends without sending."""
    assert connection.poll(seconds), "the process sent nothing"
    return connection.recv()
