"""vLLM's weight transfer without a GPU: vLLM's own code, with a TCP store in place of NCCL.

The trainer imports it; servers load it with ``--worker-extension-cls vllm_without_nccl.Worker``.
"""

import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.weight_transfer import packed_tensor

FAULT = Path(os.environ.get("BROADCAST_FAULT", "/nonexistent"))
"""Contains the number of broadcasts after which a worker fails, once."""


class StoreCommunicator:
    """Broadcasts bytes; as with NCCL, every rank waits until all have them or it is aborted."""

    disabled = False
    num_opened = 0
    before_broadcast: Callable[[], None] = lambda: None
    """Called by the sender."""

    def __init__(self, group, device):
        StoreCommunicator.num_opened += 1
        self.rank, self.store, self.size = group.rank, group.store, group.world_size
        self.number = 0

    def broadcast(self, tensor, src):
        number = self.number
        self.number += 1
        if self.rank == src:
            StoreCommunicator.before_broadcast()
            self.store.set(f"bytes {number}", tensor.numpy().tobytes())
            for rank in range(1, self.size):
                self.wait_for(f"{rank} has {number}")
        else:
            fail_if_due()
            received = bytearray(self.wait_for(f"bytes {number}"))
            tensor.copy_(torch.frombuffer(received, dtype=torch.uint8))
            self.store.set(f"{self.rank} has {number}", "")

    def wait_for(self, key):
        while not self.store.check([key]):
            if self.store.check(["aborted"]):
                raise RuntimeError("the group was aborted")
            time.sleep(0.005)
        return self.store.get(key)

    def destroy(self):
        with suppress(RuntimeError):  # the process with the store may have exited
            self.store.set("aborted", "")


def fail_if_due():
    if not FAULT.exists():
        return
    if (left := int(FAULT.read_text())) == 0:
        FAULT.unlink()
        raise RuntimeError("a worker's broadcast failed")
    FAULT.write_text(str(left - 1))


class Stream:
    def synchronize(self):
        """Do nothing: copies are synchronous on a CPU."""


class Worker:
    """An empty extension: only the import of this module matters."""


pynccl.PyNcclCommunicator = StoreCommunicator
packed_tensor._get_streams = lambda device, number: (Stream(),) * number
torch.cuda.stream = nullcontext
torch.accelerator.current_device_index = lambda: 0
