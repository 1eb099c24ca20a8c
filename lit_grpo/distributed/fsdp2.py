"""FSDP2: weights, gradients and optimizer state sharded over all ranks.

Source: Zhao et al. 2023, arXiv 2304.11277, in the form of ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_grpo.distributed.checkpoints import (
    is_deepspeed,
    load_sharded,
    load_whole,
    read_others,
    read_whole,
)
from lit_grpo.distributed.optimizer_class import has_other_optimizer
from lit_grpo.policy.sharding import Sharding, T, layers_of
from lit_grpo.types import check_range


@dataclass(frozen=True, kw_only=True)
class FSDP2Sharding(Sharding):
    """Shard each layer of a model, and what is outside the layers as one further part."""

    mesh: DeviceMesh
    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    reshard_after_forward: bool

    is_sharded = True
    loads_parts = True

    @property
    def device(self) -> str:  # type: ignore[override]
        return "cpu" if isinstance(self.offload, CPUOffloadPolicy) else self.mesh.device_type

    def shard(self, model: Any) -> None:
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": self.mixed_precision,
            "offload_policy": self.offload,
        }
        for layer in layers_of(model):
            fully_shard(layer, reshard_after_forward=self.reshard_after_forward, **options)
        model.run_forward = MethodType(lambda _, function: function(), model)
        # True: a pass without gradients would leave embeddings and head gathered.
        fully_shard(model, reshard_after_forward=True, **options)
        register_fsdp_forward_method(model, "run_forward")

    def run(self, model: Any, function: Callable[[], T]) -> T:
        result: T = model.run_forward(lambda: apply_to_collection(function(), Tensor, _no_view))
        return result

    @contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                is_layer = part is not model
                part.set_reshard_after_forward(
                    self.reshard_after_forward if is_layer else True, recurse=False
                )
                part.reshard()

    def gathered_bytes(self, model: Any) -> int:
        sizes = [(one.numel(), one.element_size()) for one in model.parameters()]
        gathered_as = self.mixed_precision.param_dtype
        return sum(n * (gathered_as.itemsize if gathered_as else size) for n, size in sizes)


def _no_view(tensor: Tensor) -> Tensor:
    """Return a tensor whose gradient FSDP2 sees even if an objective changes it in place."""
    return tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor


class FSDP2Strategy(ModelParallelStrategy):
    """Shard the policy, its gradients, its optimizer state and its reference over all ranks.

    With ``trainer.precision: bf16-mixed`` weights are gathered, computed with and sampled from in
    bfloat16; the shards and the optimizer stay in float32, in which gradients are summed.

    Args:
        cpu_offload: Keep the shards and the optimizer state in host memory.
        reshard_after_forward: Gather a layer again for its backward pass, which saves memory.
        whole_gradients: Sum the gradients over the ranks once per optimizer step, not once per
            micro-batch. Needs memory for all gradients; the sum is then rounded as under DDP.
        timeout_minutes: Time after which a rank that waits for another one fails.

    Raises:
        UserError: the timeout is not positive.
    """

    def __init__(
        self,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        whole_gradients: bool = False,
        timeout_minutes: float = 30.0,
    ) -> None:
        check_range("trainer.strategy.init_args.timeout_minutes", timeout_minutes, above=0)
        super().__init__(timeout=timedelta(minutes=timeout_minutes))
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.whole_gradients = whole_gradients

    def setup_environment(self) -> None:
        """Connect the processes to one group.

        Lightning's mesh has a second dimension, for tensor parallelism. Its groups of one process
        are split off this group, which torch cannot do if it has two backends.
        """
        self._setup_distributed()
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",)
        )

    def _get_process_group_backend(self) -> str:
        """Return the backend; on a GPU offloaded shards need a second one, to sum their norms."""
        backend = super()._get_process_group_backend()
        device = self.root_device.type
        return f"cpu:gloo,{device}:{backend}" if self._offloads_to_host else backend

    @property
    def _offloads_to_host(self) -> bool:
        """Whether shards are not where they are computed with."""
        return self.cpu_offload and self.root_device.type != "cpu"

    def model_to_device(self) -> None:
        """Move what is not sharded; shards are on their device already."""
        model: Any = self.model
        model._apply(lambda one: one if isinstance(one, DTensor) else one.to(self.root_device))
        _update_properties(model, device=self.root_device)

    @property
    def sharding(self) -> FSDP2Sharding:
        """How models are sharded; known once the processes are connected."""
        is_mixed = self.precision_plugin.precision == "bf16-mixed"
        # Pinned memory needs a GPU.
        offload = CPUOffloadPolicy(pin_memory=self._offloads_to_host)
        return FSDP2Sharding(
            mesh=self.device_mesh,
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if is_mixed else None,
                reduce_dtype=torch.float32 if is_mixed else None,
            ),
            offload=offload if self.cpu_offload else OffloadPolicy(),
            reshard_after_forward=self.reshard_after_forward,
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients unreduced within the context, if whole ones are wanted."""
        roots = [one for one in self._sharded_roots() if self.whole_gradients]
        for root in roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root in roots:
                root.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shards of this rank, without a copy."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the shards of this rank, without a copy."""
        assert self.model is not None
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a directory; every rank must call this."""
        if type(self.checkpoint_io) is TorchCheckpointIO:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            path = self.broadcast(filepath)
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory or the file of a model that was not sharded; every rank must call this.

        Weights that the checkpoint lacks are left alone: `ResumableModule` checks what is missing.
        So is an optimizer whose class is not the checkpoint's.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        if path.is_dir() and not is_deepspeed(path):
            others = read_others(path, weights_only=weights_only)
            weights = load_sharded(path, self.model, self._optimizers_of(others))
            return others | {"state_dict": weights}
        checkpoint: dict[str, Any]
        if path.is_dir():
            checkpoint = read_whole(path)
        else:
            checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        load_whole(checkpoint, self.model, self._optimizers_of(checkpoint))
        return checkpoint

    def _optimizers_of(self, checkpoint: Mapping[str, Any]) -> list[Optimizer]:
        """Return the optimizers that can load the state in a checkpoint."""
        return [one for one in self.optimizers if not has_other_optimizer(checkpoint, one)]

    def _sharded_roots(self) -> list[FSDPModule]:
        assert self.model is not None
        return [one for one in self.model.modules() if hasattr(one, "run_forward")]  # type: ignore[misc]


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="Shard the policy with FSDP2")
