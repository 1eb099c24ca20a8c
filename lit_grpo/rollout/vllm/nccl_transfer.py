"""The trainer's side of vLLM's weight transfer by NCCL: from host memory, over a group a server.

Needs neither the other ranks nor a policy that stands still. Source: vLLM's weight transfer,
checked against release 0.32; its own sender would not hear of a server's refusal as it waits.
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
from lit_grpo.rollout.server.endpoint import Endpoint, ServerError, field
from lit_grpo.rollout.weights.store import HostWeights
from lit_grpo.types import UserError

T = TypeVar("T")
BUFFER_BYTES = 256 * 2**20
"""Tensors travel packed in buffers of about this size."""
NUM_BUFFERS = 2
"""That either side has."""


def check_transfer(*, is_adapter_sent: bool) -> None:
    """Refuse what cannot come true.

    Raises:
        ValueError: nothing would be sent, or vLLM's code is missing.
    """
    if is_adapter_sent:
        raise UserError(
            "weight_transfer: nccl carries full weights, and here the adapter is sent alone "
            "(a small file, read from directory). Set model.engine.init_args.weight_transfer to "
            "disk, or weight_sync to full."
        )
    if find_spec("vllm") is None:
        raise UserError(
            "weight_transfer: nccl needs vLLM in the trainer's environment, where it is not "
            "installed (vLLM's own code sends the weights). Install the servers' release of it "
            "(pip install vllm), or set model.engine.init_args.weight_transfer to disk."
        )


class NCCLTransfer:
    """Sends full weights to servers. Everything here runs on one event loop."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Endpoint, Group] = WeakKeyDictionary()

    async def send(self, endpoint: Endpoint, weights: HostWeights, seconds: float) -> None:
        """Replace the weights of a server that is paused.

        Args:
            seconds: That each request and each piece of the transfer may take.

        Raises:
            RequestRefused, ServerError: the server has half of them, and gets them by another call.
        """
        if endpoint not in self._groups:
            self._groups[endpoint] = group = Group()
            endpoint.at_close.append(group.close)
        await self._groups[endpoint].send(endpoint, weights, seconds)


class Group:
    """This process and the workers of one server."""

    def __init__(self) -> None:
        self._communicator: Any = None
        self._is_half_way = False

    async def send(self, endpoint: Endpoint, weights: HostWeights, seconds: float) -> None:
        async def post(path: str, body: Mapping[str, Any] | None = None) -> None:
            await endpoint.call("POST", path, body, seconds=seconds)

        if self._is_half_way:
            await _end_update(endpoint, seconds)
            self._is_half_way = False
        try:
            if self._communicator is None:
                await self._open(endpoint, weights.device, seconds)
            self._is_half_way = True
            await post("/start_weight_update")
            broadcast = partial(_broadcast, self._communicator, weights)
            await gather_or_cancel(
                [
                    post("/update_weights", {"update_info": _description(weights.tensors)}),
                    _in_thread(broadcast, "the broadcast of its weights", seconds),
                ]
            )
            await post("/finish_weight_update")
        except BaseException:
            self.close()
            raise
        self._is_half_way = False

    async def _open(self, endpoint: Endpoint, device: torch.device, seconds: float) -> None:
        world = await endpoint.call("GET", "/get_world_size", seconds=seconds)
        find_place = partial(_meeting_place, endpoint.url)
        address, port = await _in_thread(find_place, "the way to it", seconds)
        meeting = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + field(world, "world_size"),
        }
        wire = {
            "rank_offset": 1,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": NUM_BUFFERS,
        }

        async def join() -> None:
            what = "the meeting of its NCCL group"
            self._communicator = await _in_thread(
                partial(_join, meeting, device), what, seconds, undo=_destroy
            )

        body = {"init_info": meeting | wire}
        invite = endpoint.call("POST", "/init_weight_transfer_engine", body, seconds=seconds)
        await gather_or_cancel([join(), invite])

    def close(self) -> None:
        """Give the group up; what still waits in it is let go."""
        if self._communicator is not None:  # which may take seconds, and the server is gone
            run_in_daemon_thread(partial(_destroy, self._communicator), "NCCL teardown")
            self._communicator = None


def _destroy(communicator: Any) -> None:
    communicator.destroy()


async def _end_update(endpoint: Endpoint, seconds: float) -> None:
    """End one that broke off, or the next would begin with half-filled layers."""
    with suppress(ServerError):  # it may have been begun
        await endpoint.call("POST", "/start_weight_update", seconds=seconds)
    for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
        await endpoint.call("POST", path, seconds=seconds)


def _meeting_place(url: str) -> tuple[str, int]:
    """The address that this machine has towards a server, and a free port there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((urlsplit(url).hostname, 9))  # sends nothing
        address = towards.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _description(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """What vLLM is to make of the bytes that come."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _join(meeting: Mapping[str, Any], device: torch.device) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    _use(device)
    communicator = trainer_init(meeting)
    if communicator.disabled:  # it would send nothing, and say nothing
        raise RuntimeError("NCCL could not be loaded")
    return communicator


def _broadcast(communicator: Any, weights: HostWeights) -> None:
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    _use(weights.device)
    packed_nccl_broadcast_producer(
        iterator=iter(weights.tensors.items()),
        group=communicator,
        src=0,
        post_iter_func=lambda weight: weight[1].to(weights.device),
        buffer_size_bytes=BUFFER_BYTES,
        num_buffers=NUM_BUFFERS,
    )


def _use(device: torch.device) -> None:
    """Every thread has a current GPU of its own."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


async def _in_thread(
    function: Callable[[], T],
    what: str,
    seconds: float,
    undo: Callable[[T], None] = lambda result: None,
) -> T:
    """Its result; a function that hangs keeps neither the event loop nor the process from ending.

    Args:
        undo: Gets a result that nobody waits for any more.

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
