"""Those of `sharded_trainings` on the pretend device, with names such as ``fsdp2 on a device``."""

from __future__ import annotations

import sharded_trainings
from lightning.pytorch.strategies import DDPStrategy
from pretend_shards import on_pretend_devices, pretend_shards
from sharded_results import ON_DEVICE
from sharded_trainings import STRATEGIES


def main() -> None:
    STRATEGIES["ddp"] = DDPStrategy
    for name, make in list(STRATEGIES.items()):
        STRATEGIES[f"{name}{ON_DEVICE}"] = lambda make=make: on_pretend_devices(make())
    with pretend_shards():
        sharded_trainings.main()
