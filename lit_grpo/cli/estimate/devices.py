"""The devices that a step can be planned for, and the parser of ``--gpus 8xH100``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from lit_grpo.types import setting_error

GIB = 2**30
GB = 1e9
TERA = 1e12
HOST_SECONDS_PER_LAYER = 0.7e-3
"""Time in which Python sends the kernels of one layer's forward pass to a GPU: about 45 of them
with `transformers`, at 15 microseconds each. An estimate; no GPU was measured for it."""

HOST_SECONDS_PER_PASS = 1e-3
"""The same outside the layers: for masks, positions, logits, and sampling a token."""
ATTENTION_SHARE = 0.5
"""Rate of attention with a mask on a GPU, as a share of the rate of products: torch's kernels that
take a mask are not flash attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or the CPU of this machine.

    Rates of GPUs are from the data sheets, without sparsity; `seconds` multiplies them by the
    share that is reached.
    """

    name: str
    memory: int
    """Bytes that torch sees."""
    flops: float
    """Operations per second of matrix products in bfloat16."""
    flops_float32: float
    """The same in float32, as torch computes them by default."""
    bandwidth: float
    """Bytes per second of the memory."""
    link: float
    """Bytes per second that a GPU sends to the others of its node while it receives as much."""
    network: float
    """Bytes per second that all GPUs of a node together send to other nodes."""
    attention_share: float = ATTENTION_SHARE
    """Rate of attention with a mask, as a share of the rate of matrix products."""
    few_rows_share: float = 1.0
    """Rate of float32 products with as few rows as sampling has, as a share of that with many."""
    few_rows_share_16: float = 1.0
    """The same in bfloat16."""
    few_rows_attention_share: float = 1.0
    """The same for attention, in sampling; on GPUs it is limited by memory."""
    fresh_bandwidth: float = math.inf
    """Bytes per second at which a program gets memory from the system, as a large tensor on a CPU
    does whenever it is made; allocators of GPUs keep theirs."""
    host_seconds_per_layer: float = HOST_SECONDS_PER_LAYER
    """Time in which Python issues the operations of a layer's forward pass."""
    host_seconds_per_pass: float = HOST_SECONDS_PER_PASS
    """The same for what is outside the layers, including sampling a token."""
    is_gpu: bool = True


def _gpu(
    name: str, gib: float, rates: tuple[float, float, float], links: tuple[float, float]
) -> Device:
    flops, flops_float32, bandwidth = rates
    return Device(
        name=name,
        memory=round(gib * GIB),
        flops=flops * TERA,
        flops_float32=flops_float32 * TERA,
        bandwidth=bandwidth * TERA,
        link=links[0] * GB,
        network=links[1] * GB,
    )


DEVICES = {
    one.name: one
    for one in (
        # memory in GiB; TFLOP/s in bfloat16 and float32, TB/s; GB/s to the node and to other nodes
        _gpu("H100", 79, (790, 52, 3.0), (450, 400)),
        _gpu("H200", 139, (790, 52, 4.3), (450, 400)),
        _gpu("B200", 178, (2250, 75, 8.0), (900, 400)),
        _gpu("A100-80", 79, (312, 19.5, 2.0), (300, 200)),
        _gpu("A100-40", 39.4, (312, 19.5, 1.55), (300, 200)),
        _gpu("L40S", 44.4, (362, 91, 0.86), (32, 25)),
        _gpu("4090", 23.5, (165, 82, 1.0), (32, 1.25)),
    )
}
"""Name -> device. Of H100 and H200 the rate of products and of memory were measured: 790 TFLOP/s
with 3.0 (3.35 on the data sheet) and 4.3 TB/s. The memory is what is left for torch. Links are
NVLink, or PCIe for L40S and 4090; the network has an adapter of 400 Gbit/s a GPU for Hopper and
Blackwell, of 200 Gbit/s for A100, one of 200 Gbit/s for L40S, and of 10 Gbit/s for 4090."""

ALIASES = {"A100": "A100-80", "RTX4090": "4090", "H100-80": "H100", "L40": "L40S"}
CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices of a run, one for each rank."""

    device: Device
    per_node: int = 1
    num_nodes: int = 1

    @property
    def num_ranks(self) -> int:
        return self.per_node * self.num_nodes

    @property
    def is_gpu(self) -> bool:
        return self.device.is_gpu

    @property
    def name(self) -> str:
        nodes = f" on each of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{self.per_node} x {self.device.name}{nodes}"

    @property
    def collective_rate(self) -> float:
        """Bytes per second of a rank's part of a collective operation, without any share lost."""
        if self.num_nodes == 1:
            return self.device.link
        return min(self.device.link, self.device.network)


def parse_gpus(text: str) -> tuple[int, str]:
    """Return the number of devices of a node and their name: 8 and H100 of ``8xH100``.

    Raises:
        UserError: there is no such device.
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?([\w-]+)", text.strip(), re.IGNORECASE)
    name = match[2] if match else text
    known = {one.lower(): one for one in (*DEVICES, *ALIASES, CPU)}
    found = known.get(name.lower())
    number = int(match[1]) if match and match[1] else 1
    if found is None or number < 1:
        raise setting_error(
            "gpus",
            f"a number and a device, such as 8xH100, out of {', '.join([*DEVICES, CPU])}",
            repr(text),
            "their speed and memory are in a table",
        )
    return number, ALIASES.get(found, found)


def device_of_gpu(name: str) -> Device:
    """Return the device that has the name that CUDA reports, such as ``NVIDIA H100 80GB HBM3``.

    Raises:
        UserError: it is not in the table.
    """
    words = re.sub(r"[^A-Z0-9]+", " ", name.upper()).split()
    if "A100" in words or any(word.startswith("A100") for word in words):
        return DEVICES["A100-40" if "40GB" in words else "A100-80"]
    for one in DEVICES.values():
        if one.name in words:
            return one
    rule = f"the most similar of {', '.join(DEVICES)}"
    raise setting_error("--gpus", rule, name, "the speed of this machine's GPU is not known")
