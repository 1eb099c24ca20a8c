"""The trainer's side of vLLM's weight transfer by NCCL: from host memory, one group per server.

Other ranks are not involved, and the policy may change during it. Source: vLLM's weight transfer,
checked against release 0.32; its own sender would not notice that a server refuses the update.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lit_grpo.concurrency import gather_or_cancel, run_in_daemon_thread
from lit_grpo.rollout.server.endpoint import Endpoint, ServerError, require_field
from lit_grpo.rollout.weights.store import HostWeights
from lit_grpo.types import UserError

T = TypeVar("T")
BUFFER_BYTES = 256 * 2**20
"""Tensors are packed into buffers of about this size."""
NUM_BUFFERS = 2
"""Number of buffers on each side."""


def check_transfer(*, is_adapter_sent: bool) -> None:
    """Check that weights can be sent by NCCL.

    Raises:
        UserError: full weights are not sent, or vLLM is not installed here.
    """
    if is_adapter_sent:
        raise UserError(
            "weight_transfer must be disk if only the adapter is sent, got nccl (the adapter is a "
            "small file, which the server reads from directory). Set "
            "model.engine.init_args.weight_transfer to disk, or weight_sync to full."
        )
    if find_spec("vllm") is None:
        raise UserError(
            "weight_transfer: nccl needs vLLM, which is not installed in the trainer's environment "
            "(vLLM's own code sends the weights). Install the servers' release of it (pip install "
            "vllm), or set model.engine.init_args.weight_transfer to disk."
        )


class NCCLTransfer:
    """Send full weights to servers. Everything here runs on one event loop."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Endpoint, TransferGroup] = WeakKeyDictionary()

    async def send(self, endpoint: Endpoint, weights: HostWeights, seconds: float) -> None:
        """Replace the weights of a paused server.

        Args:
            seconds: Timeout of each request and of each part of the transfer.

        Raises:
            RequestRefused, ServerError: the server may have only some of the weights; sending them
                again replaces them all.
        """
        if endpoint not in self._groups:
            self._groups[endpoint] = group = TransferGroup()
            endpoint.on_close.append(group.close)
        await self._groups[endpoint].send(endpoint, weights, seconds)


class TransferGroup:
    """The NCCL group of this process and the workers of one server."""

    def __init__(self) -> None:
        self._communicator: Any = None
        self._is_interrupted = False
        """Whether an update was started and not finished."""

    async def send(self, endpoint: Endpoint, weights: HostWeights, seconds: float) -> None:
        async def post(path: str, body: Mapping[str, Any] | None = None) -> None:
            await endpoint.call("POST", path, body, seconds=seconds)

        if self._is_interrupted:
            await _end_interrupted_update(endpoint, seconds)
            self._is_interrupted = False
        try:
            if self._communicator is None:
                await self._open(endpoint, weights.device, seconds)
            self._is_interrupted = True
            await post("/start_weight_update")
            broadcast = partial(_broadcast, self._communicator, weights)
            await gather_or_cancel(
                [
                    post("/update_weights", {"update_info": _describe(weights.tensors)}),
                    _in_thread(broadcast, "the broadcast of the weights", seconds),
                ]
            )
            await post("/finish_weight_update")
        except BaseException:
            self.close()
            raise
        self._is_interrupted = False

    async def _open(self, endpoint: Endpoint, device: torch.device, seconds: float) -> None:
        world = await endpoint.call("GET", "/get_world_size", seconds=seconds)
        choose = partial(_master_address, endpoint.url)
        address, port = await _in_thread(choose, "choosing an address for NCCL", seconds)
        rendezvous = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + require_field(world, "world_size"),
        }
        packing = {
            "rank_offset": 1,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": NUM_BUFFERS,
        }

        async def join() -> None:
            what = "opening the NCCL group"
            self._communicator = await _in_thread(
                partial(_join, rendezvous, device), what, seconds, undo=_destroy
            )

        body = {"init_info": rendezvous | packing}
        invite = endpoint.call("POST", "/init_weight_transfer_engine", body, seconds=seconds)
        await gather_or_cancel([join(), invite])

    def close(self) -> None:
        """Destroy the group, which releases threads that still wait in it."""
        if self._communicator is not None:  # in a thread: it may take seconds if the server died
            run_in_daemon_thread(partial(_destroy, self._communicator), "NCCL teardown")
            self._communicator = None


def _destroy(communicator: Any) -> None:
    communicator.destroy()


async def _end_interrupted_update(endpoint: Endpoint, seconds: float) -> None:
    """End an interrupted update, or the next one would begin with partly filled layers."""
    with suppress(ServerError):  # an update may be in progress already
        await endpoint.call("POST", "/start_weight_update", seconds=seconds)
    for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
        await endpoint.call("POST", path, seconds=seconds)


def _master_address(url: str) -> tuple[str, int]:
    """Return this machine's address as a server sees it, and a free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
        outgoing.connect((urlsplit(url).hostname, 9))  # UDP: nothing is sent
        address = outgoing.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the names, dtypes and shapes with which vLLM unpacks the buffers."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _join(rendezvous: Mapping[str, Any], device: torch.device) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    _set_device(device)
    communicator = trainer_init(rendezvous)
    if communicator.disabled:  # it would send nothing and raise no error
        raise RuntimeError("NCCL could not be loaded")
    return communicator


def _broadcast(communicator: Any, weights: HostWeights) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    _set_device(weights.device)
    packed_nccl_broadcast_producer(
        iterator=iter(weights.tensors.items()),
        group=communicator,
        src=0,
        post_iter_func=lambda weight: weight[1].to(weights.device),
        buffer_size_bytes=BUFFER_BYTES,
        num_buffers=NUM_BUFFERS,
    )


def _set_device(device: torch.device) -> None:
    """Set the current GPU of this thread; each thread has its own."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


async def _in_thread(
    function: Callable[[], T],
    what: str,
    seconds: float,
    undo: Callable[[T], None] = lambda result: None,
) -> T:
    """Run a function in a thread that blocks neither the event loop nor the end of the process.

    Args:
        what: Name of the work in messages.
        undo: Function to call with a result that arrives after the timeout or a cancellation.

    Raises:
        ServerError: it failed, or took too long.
    """
    is_given_up = threading.Event()

    def work() -> T:
        result = function()
        if is_given_up.is_set():
            undo(result)
        return result

    try:
        async with asyncio.timeout(seconds) as limit:
            return await asyncio.wrap_future(run_in_daemon_thread(work, what))
    except asyncio.CancelledError:
        is_given_up.set()
        raise
    except TimeoutError as error:
        if not limit.expired():
            raise ServerError(f"{what}: {type(error).__name__}: {error}") from error
        is_given_up.set()
        raise ServerError(f"{what}: not done within {seconds:g} s") from None
    except Exception as error:
        raise ServerError(f"{what}: {type(error).__name__}: {error}") from error
