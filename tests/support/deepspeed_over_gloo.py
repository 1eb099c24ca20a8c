"""DeepSpeed without its shared memory for CPUs, which it would compile for a minute."""

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # then it sends by gloo
