"""vLLM's server on a CPU, but with forked processes, as on a GPU: it starts in a third of the time.

On a CPU, vLLM starts an interpreter for its engine core and another one for its worker, and each
imports everything again. This is a program for the environment that has vLLM.
"""

import gc
import os
import sys

gc.disable()  # nothing that is imported becomes garbage
sys.modules["scipy"] = None  # transformers would import it, for a second, for losses of detection

from vllm.entrypoints.launchers.api_server.entry import main  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402

check_and_update_config = CpuPlatform.check_and_update_config


def check_and_fork(config):
    check_and_update_config(config)  # which sets this to "spawn"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    gc.freeze()  # no process looks again at what it shares with the others


CpuPlatform.check_and_update_config = staticmethod(check_and_fork)

if __name__ == "__main__":
    gc.enable()
    main()
