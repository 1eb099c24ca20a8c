"""Several ranks on pretend devices: what strategies need beyond tensors.

Import this before the first backward pass of a process: see `device_trainings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.strategies import DDPStrategy, deepspeed
from pretend_device import DEVICE, PretendAccelerator, PretendTensor, pretend_device
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

from lit_grpo.distributed.deepspeed import ZeROStrategy, leave_out_shared_memory


class Event:
    """A point of a stream that is always reached."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class Stream:
    """A stream that does its work when it is asked to."""

    def __init__(self, priority: int = 0) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass


@contextmanager
def run_on(stream: Stream) -> Iterator[None]:
    yield


STREAMS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "stream": run_on,
    "current_stream": lambda device=None: Stream(),
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "set_device": lambda device: None,
}
for _name, _value in STREAMS.items():
    setattr(torch.pretend, _name, _value)


def on_pretend_devices(strategy: Any) -> Any:
    """Return a strategy after giving each of its ranks such a device."""
    kind = type(strategy)
    methods: dict[str, Any] = {
        "_get_process_group_backend": lambda self: "cpu:gloo,pretend:gloo",
    }
    if isinstance(strategy, DDPStrategy):
        # With indices of devices it would ask for streams of CUDA.
        methods["determine_ddp_device_ids"] = lambda self: None
    if isinstance(strategy, ZeROStrategy):
        let_deepspeed_use_the_device()
        # It moves the model to the CPU, where parameters of this device become other ones.
        methods["teardown"] = lambda self: None
    strategy.__class__ = type(kind.__name__, (kind,), methods)
    strategy.accelerator = PretendAccelerator()
    return strategy


def let_deepspeed_use_the_device() -> None:
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class PretendDeepSpeedAccelerator(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "pretend" if device_index is None else f"pretend:{device_index}"

        def current_device_name(self) -> str:
            return str(DEVICE)

        def current_device(self) -> int:
            return 0

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device == DEVICE

    set_accelerator(PretendDeepSpeedAccelerator())
    deepspeed._validate_device_index_selection = lambda devices: None  # all have index 0
    leave_out_shared_memory()


@contextmanager
def pretend_shards() -> Iterator[None]:
    """Make the device usable, and let FSDP2 free the memory of its tensors."""
    alloc, free = map(_of_inner, (_fsdp_param.alloc_storage, _fsdp_param.free_storage))
    with (
        pretend_device(),
        patch.object(_fsdp_param, "alloc_storage", alloc),
        patch.object(_fsdp_param, "free_storage", free),
        patch.object(_fsdp_param_group, "alloc_storage", alloc),
    ):
        yield


def _of_inner(function: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda tensor: function(tensor.inner if isinstance(tensor, PretendTensor) else tensor)
