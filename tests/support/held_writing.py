"""Hold a run while it writes a sharded checkpoint, in the background or not."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
from torch.distributed.checkpoint import FileSystemWriter

from lit_grpo.distributed.ranks import get_rank


class HoldWriting(L.Callback):
    """Hold each rank as it writes the checkpoint of this number until ``signalled`` exists.

    ``held0`` and so on say that a rank is held; with the file ``go`` none is.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._num_written = 0

    def on_train_start(self, trainer, pl_module):
        FileSystemWriter.write_data = self._held(FileSystemWriter.write_data)
        if find_spec("deepspeed"):
            from deepspeed.runtime.engine import DeepSpeedEngine

            DeepSpeedEngine.save_checkpoint = self._held(DeepSpeedEngine.save_checkpoint)

    def _held(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def write_later(*arguments: Any, **settings: Any) -> Any:
            self._num_written += 1
            if self._num_written == self.number and not Path("go").exists():
                Path(f"held{get_rank()}").touch()
                while not Path("signalled").exists():
                    time.sleep(0.02)
            return write(*arguments, **settings)

        return write_later
