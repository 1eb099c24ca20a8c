"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and weights (3) partitioned over all ranks.

Source: Rajbhandari et al. 2020, arXiv 1910.02054. ``deepspeed`` is imported when it is used.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry
from torch import nn
from torch.optim import Optimizer

from lit_grpo.distributed.checkpoints import (
    DEEPSPEED,
    WRITE,
    ZERO_TAG,
    Partition,
    is_deepspeed,
    local_part,
    read_others,
    read_whole,
    save_sharded,
)
from lit_grpo.distributed.deepspeed_checkpoints import WholeTraining, ZeROTraining
from lit_grpo.distributed.deepspeed_engine import EnginePrecision, ZeROSharding, ZeROSteps
from lit_grpo.distributed.deepspeed_loading import move_buffers
from lit_grpo.distributed.deepspeed_resume import load_training, trained_names
from lit_grpo.distributed.optimizer_class import has_other_optimizer
from lit_grpo.types import UserError, check_range, setting_error

FIXED = ("gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler", "bf16")
"""Settings of DeepSpeed that this strategy makes itself, or that other settings replace."""


class ZeROStrategy(DeepSpeedStrategy):
    """Partition what the training of a policy needs over all ranks, by DeepSpeed.

    Args:
        stage: What is partitioned: the optimizer state (1), also the gradients (2), also the
            weights of policy and reference (3).
        offload_optimizer: Keep the optimizer state in host memory and take its steps there.
        offload_parameters: Keep the partitions of the weights in host memory, in stage 3.
        config: Further settings of DeepSpeed, such as ``{zero_optimization: {overlap_comm:
            false}}``. They are merged with this strategy's own.
        timeout_minutes: Time after which a rank that waits for another one fails.

    Raises:
        UserError: DeepSpeed is not installed, or a setting is wrong.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: dict[str, Any] | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        key, given = "trainer.strategy.init_args", config or {}
        check_range(f"{key}.timeout_minutes", timeout_minutes, above=0)
        if stage not in (1, 2, 3):
            raise setting_error(f"{key}.stage", "1, 2 or 3", stage)
        if offload_parameters and stage < 3:
            why = "only stage 3 partitions weights"
            raise setting_error(f"{key}.offload_parameters", "false", offload_parameters, why)
        if fixed := sorted(given.keys() & {*FIXED}):
            why = "it follows from other settings, such as model.update"
            raise setting_error(f"{key}.config", f"a dict without {fixed[0]}", given, why)
        if find_spec("deepspeed") is None:
            raise UserError(
                "trainer.strategy needs the package deepspeed, which is not installed. "
                "Run: pip install 'lit-grpo[deepspeed]', or set trainer.strategy to fsdp2."
            )
        self.stage = stage
        zero = _zero_config(stage, offload_optimizer, offload_parameters)
        merged = {
            "train_micro_batch_size_per_gpu": 1,  # for the engine's own log only
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **given,
            "zero_optimization": {**zero, **given.get("zero_optimization", {})},
        }
        super().__init__(config=merged, timeout=timedelta(minutes=timeout_minutes))

    @property
    def engine(self) -> Any:
        """The engine; None until it is made, and where nothing is trained."""
        return None if self.model is self.lightning_module else self.model

    @property
    def is_training(self) -> bool:
        """Whether the engine exists or will be made."""
        return bool(self._module.trainer.training)

    @property
    def _module(self) -> Any:
        return self.lightning_module

    @property
    def partition(self) -> Partition:
        """How tensors are partitioned."""
        return Partition(stage=self.stage, num_ranks=self.world_size)

    @property
    def sharding(self) -> ZeROSharding:
        return ZeROSharding(strategy=self)

    @property
    def steps(self) -> ZeROSteps:
        return ZeROSteps(strategy=self)

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning accumulates, in `block_backward_sync`, and takes the steps."""
        return False

    def setup_environment(self) -> None:
        self._precision_plugin = EnginePrecision(self.precision_plugin.precision, self)
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            leave_out_shared_memory()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Do nothing: in stage 3 `ZeROSharding` partitions a model as it is loaded."""
        yield

    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        self.config |= {
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._module.trainer.gradient_clip_val or 0.0,
        }

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        import deepspeed

        move_buffers(model, self.root_device)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer, schedule = self._init_optimizers()
        index = self.root_device.index
        self.model, zero_optimizer, _, _ = deepspeed.initialize(
            args=None if index is None else Namespace(device_rank=index),
            config=self.config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            dist_init_required=False,
        )
        self.optimizers = [zero_optimizer]
        self.lr_scheduler_configs = [] if schedule is None else [schedule]

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Keep the model whole: nothing is trained."""
        model.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate the gradient of a micro-batch that is not the last one of a step."""
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step outside of the engine, which is called once a micro-batch within it."""
        with self.precision_plugin.train_step_context():
            return self._module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._module.test_step(*args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the parts of this rank, without a copy."""
        state_dict = self._module.state_dict(keep_vars=True)
        return {name: local_part(one) for name, one in state_dict.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the parts of this rank, without a copy."""
        zero_optimizer: Any = getattr(optimizer, "_optimizer", optimizer)
        return {"state": zero_optimizer.optimizer.state}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Write a directory; every rank must call this."""
        path = self.broadcast(filepath)
        names = list(checkpoint["state_dict"])
        checkpoint[DEEPSPEED] = asdict(self.partition)
        checkpoint["weight_names"] = names
        checkpoint[WRITE] = partial(
            self.engine.save_checkpoint,
            tag=ZERO_TAG,
            save_latest=False,
            exclude_frozen_parameters=self._names(are_trained=False).isdisjoint(names),
        )
        if type(self.checkpoint_io) is TorchCheckpointIO:
            Path(path).mkdir(parents=True, exist_ok=True)
            save_sharded(checkpoint, Path(path))
        else:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load any checkpoint; every rank must call this.

        DeepSpeed reads checkpoints that it wrote in the same stage, with as many ranks. An
        optimizer to which the state in the checkpoint is of no use is left alone.
        """
        path = Path(self.broadcast(checkpoint_path))
        if self.engine is None:
            return self._load_weights(path, weights_only)
        if not path.is_dir() or not is_deepspeed(path):
            return self._load_whole(path, weights_only)
        checkpoint = read_others(path, weights_only=weights_only)
        names = dict.fromkeys(checkpoint.pop("weight_names"))
        has_optimizer = not has_other_optimizer(checkpoint, self.engine.optimizer)
        if self._names(are_trained=True) <= names.keys():  # else `ResumableModule` raises
            if Partition(**checkpoint[DEEPSPEED]) == self.partition and has_optimizer:
                self.engine.load_checkpoint(
                    str(path),
                    tag=ZERO_TAG,
                    load_module_strict=False,
                    load_lr_scheduler_states=False,
                )
            else:
                saved = ZeROTraining(path / ZERO_TAG)
                load_training(self.engine, saved, names, with_optimizer=has_optimizer)
        return checkpoint | {"state_dict": names}

    def _load_whole(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Load a checkpoint of another strategy into the engine."""
        checkpoint = _read(path, weights_only)
        names = checkpoint["state_dict"].keys()
        if self._names(are_trained=True) <= names:  # else `ResumableModule` raises
            whole = WholeTraining(checkpoint, trained_names(self.engine))
            has_optimizer = not has_other_optimizer(checkpoint, self.engine.optimizer)
            load_training(self.engine, whole, names, with_optimizer=has_optimizer)
        return checkpoint

    def _load_weights(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Load the weights of a checkpoint into a model that is not partitioned."""
        checkpoint = _read(path, weights_only, with_optimizers=False)
        self._module.load_state_dict(checkpoint["state_dict"], strict=False)
        return checkpoint

    def _names(self, *, are_trained: bool) -> set[str]:
        named = self._module.named_parameters()
        return {name for name, one in named if one.requires_grad == are_trained}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the weights."""


def leave_out_shared_memory() -> None:
    """Let DeepSpeed send by gloo only.

    It would compile operators that reduce through shared memory, for about a minute, and only its
    inference uses them. If it is killed during this, every later start waits for its lock.
    """
    import deepspeed

    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def _read(path: Path, weights_only: bool | None, *, with_optimizers: bool = True) -> dict[str, Any]:
    """Return a checkpoint as one that is not sharded."""
    if path.is_dir():
        return read_whole(path, with_optimizers=with_optimizers)
    checkpoint: dict[str, Any] = torch.load(
        path, map_location="cpu", mmap=True, weights_only=weights_only
    )
    return checkpoint


def _zero_config(stage: int, offload_optimizer: bool, offload_parameters: bool) -> dict[str, Any]:
    offloaded = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    config: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True}
    if offload_optimizer:
        config["offload_optimizer"] = offloaded
    if offload_parameters:
        config["offload_param"] = offloaded
    return config


for _stage in (1, 2, 3):
    StrategyRegistry.register(
        f"deepspeed_stage_{_stage}",
        ZeROStrategy,
        description=f"DeepSpeed ZeRO stage {_stage}",
        override=True,
        stage=_stage,
    )
for _stage in (2, 3):
    StrategyRegistry.register(
        f"deepspeed_stage_{_stage}_offload",
        ZeROStrategy,
        description=f"DeepSpeed ZeRO stage {_stage}, offloaded to host memory",
        override=True,
        stage=_stage,
        offload_optimizer=True,
        offload_parameters=_stage == 3,
    )
