from functools import partial

import torch
from forked import run_in_processes
from tiny import tiny_policy

from lit_grpo.policy.sharding import compute_device


def device_of_shards_in_host_memory(store) -> str:
    import pretend_device  # noqa: F401 - defines the type of device
    from torch.distributed.tensor import DeviceMesh, DTensor, Shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    mesh = DeviceMesh("pretend", [0])
    model = torch.nn.Linear(2, 2, bias=False)
    weight = model.weight.detach()
    spec = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)._spec
    model.weight = torch.nn.Parameter(DTensor(weight, spec, requires_grad=False))
    assert model.weight.device.type == "cpu"
    torch.distributed.destroy_process_group()
    return str(compute_device(model))


def test_a_model_computes_where_it_is_or_where_its_shards_are_gathered(tmp_path):
    assert compute_device(tiny_policy().model) == torch.device("cpu")
    assert compute_device(torch.nn.Linear(1, 1, device="meta")) == torch.device("meta")
    offloaded = partial(device_of_shards_in_host_memory, tmp_path / "store")
    assert run_in_processes(offloaded) == ["pretend:0"]
