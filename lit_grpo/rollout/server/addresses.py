"""Check that the trainer's processes and the servers reach each other and the same files."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.rollout.server.api import Launch
from lit_grpo.rollout.server.launching import check_url, is_on_this_machine, launched_url
from lit_grpo.types import UserError, setting_error


def check_servers(launch: Launch | None, urls: Sequence[str], directory: str | None) -> None:
    """Check which servers to use, and that they can read the directory.

    Raises:
        UserError: these settings contradict each other, or a url is not an address.
    """
    if launch is not None and urls:
        raise UserError(
            f"launch and urls must not both be set, got {launch} and {urls} (a run launches its "
            "servers or uses running ones). Set only one of them in model.engine.init_args."
        )
    for url in urls:
        check_url(url)
    if directory is None and not all(map(is_on_this_machine, urls)):
        raise UserError(
            f"directory must be set for servers on other machines, got null and {urls} (they read "
            "the weights from there). Set model.engine.init_args.directory to one that all "
            "machines see under the same path."
        )


def check_shared_servers(
    num_nodes: int, launch: Launch | None, urls: Sequence[str], directory: str | None
) -> None:
    """Check that processes on several machines can share the servers and the directory.

    Raises:
        UserError: they cannot.
    """
    key = "model.engine.init_args"
    several = f"with trainer.num_nodes: {num_nodes}"
    if launch is not None and is_on_this_machine(launched_url(launch.host, 1)):
        raise setting_error(
            f"{key}.launch.host",
            f"an address of rank 0's machine that the others reach {several}",
            launch.host,
            "a process on another machine would look for the server on its own; or start the "
            f"servers yourself and set {key}.urls",
        )
    if any(map(is_on_this_machine, urls)):
        raise setting_error(
            f"{key}.urls",
            f"addresses that all machines reach {several}",
            urls,
            "a process on another machine would look for the server on its own",
        )
    if directory is None:
        raise setting_error(
            f"{key}.directory",
            f"one that all machines see under the same path {several}",
            None,
            "rank 0 writes there what servers and other processes read",
        )
