"""Run the model, the optimizer steps and the precision through DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor, nn

from lit_grpo.distributed.deepspeed_compile import compile_layers
from lit_grpo.distributed.deepspeed_loading import gathered_in_turn, keeps_partitions, partition
from lit_grpo.distributed.gradients import OptimizerSteps
from lit_grpo.policy.sharding import Sharding, T, whole, whole_shape
from lit_grpo.types import UserError


class HasEngine(Protocol):
    """A strategy with an engine."""

    @property
    def stage(self) -> int:
        """Stage of ZeRO: 1, 2 or 3."""

    @property
    def engine(self) -> Any:
        """The engine; None until it is made, and where nothing is trained."""

    @property
    def is_training(self) -> bool:
        """Whether there will be an engine."""

    @property
    def root_device(self) -> torch.device: ...

    @property
    def config(self) -> Any:
        """The settings of DeepSpeed."""

    @property
    def precision_plugin(self) -> Any: ...


def refuse_layered_head(model: Any) -> None:
    """Refuse a head of several layers, whose weights stage 3 would collect for each chunk.

    Raises:
        UserError: the head has an adapter, or is trained in addition to one.
    """
    if any(model.get_output_embeddings().children()):
        raise UserError(
            "model.policy.lora must leave the output layer as it is in stage 3 of DeepSpeed "
            "(ranks have different numbers of chunks of tokens, and would wait for each other "
            "until the timeout). Set trainer.strategy to fsdp2, or take it out of target_modules "
            "and modules_to_save."
        )


@dataclass(frozen=True, kw_only=True)
class ZeROSharding(Sharding):
    """Use the weights of a model only inside a call of the engine, which partitions them."""

    strategy: HasEngine

    is_sharded = True

    @property
    def loads_parts(self) -> bool:  # type: ignore[override]
        if self.strategy.stage < 3 or not self.strategy.is_training:
            return False
        return keeps_partitions(self.strategy.config["zero_optimization"])

    def shard(self, model: Any) -> None:
        if self.strategy.stage == 3:
            refuse_layered_head(model)
        if self.loads_parts:
            partition(model, self.strategy.config)

    def run(self, model: Any, function: Callable[[], T]) -> T:
        engine = self.strategy.engine
        if engine is None:
            with gathered_in_turn(model):
                return function()
        # The engine turns autocast off, with a warning if it was on.
        with torch.autocast(self.strategy.root_device.type, enabled=False):
            result: T = engine(partial(self._with_precision, function))
        return result

    def _with_precision(self, function: Callable[[], T]) -> T:
        with self.strategy.precision_plugin.forward_context():
            return function()

    def run_part(self, part: nn.Module, function: Callable[[Tensor], T], states: Tensor) -> T:
        """Call a function between the hooks of a part, by which the engine collects its weights.

        The engine records the order of all hooks. Ranks whose orders differ wait for ever.
        """
        if self.strategy.engine is None or self.strategy.stage < 3:
            return function(states)
        part.forward = function
        try:
            result: T = part(states)
        finally:
            del part.forward
        return result

    def compiled(self, body: Any) -> Callable[..., Any]:
        if self.strategy.stage < 3:
            return super().compiled(body)
        compile_layers(body)
        forward: Callable[..., Any] = body
        return forward

    @contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        if self.strategy.engine is None or self.strategy.stage < 3:
            yield
            return
        with whole(list(model.parameters())), _without_hooks(self.strategy.engine):
            yield

    def gathered_bytes(self, model: Any) -> int:
        if self.strategy.engine is None or self.strategy.stage < 3:
            return 0
        weights = model.parameters()
        return sum(whole_shape(one).numel() * one.element_size() for one in weights)


@contextmanager
def _without_hooks(engine: Any) -> Iterator[None]:
    """Let the parts of a model run without the hooks that free its weights again.

    As ``unwrap_model_for_generation`` of TRL does it.
    """
    offload = engine.optimizer.parameter_offload
    for parameter in engine.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    try:
        yield
    finally:
        offload._register_deepspeed_module(offload.module)


@dataclass(frozen=True, kw_only=True)
class ZeROSteps(OptimizerSteps):
    """Let the engine clip the gradient and take the step; only then is the norm known."""

    strategy: HasEngine

    def take(self, optimizer: Any, parameters: Any, max_norm: float) -> tuple[Tensor, bool]:
        engine = self.strategy.engine
        engine.optimizer.clip_grad = max_norm
        engine.step()
        norm = self.norm(parameters)
        is_finite = bool(norm.isfinite())
        if is_finite:  # else the engine has left the step out
            optimizer.step()  # only lets Lightning count it
        return norm, is_finite

    def norm(self, parameters: Any) -> Tensor:
        """Return the norm of the gradient of the step that the engine has just taken."""
        norm = self.strategy.engine.get_global_grad_norm()
        return torch.as_tensor(norm, device=self.strategy.root_device)


class EnginePrecision(DeepSpeedPrecision):
    """Leave weights and inputs as they are; autocast as under other strategies."""

    def __init__(self, precision: Any, strategy: HasEngine) -> None:
        super().__init__(precision)
        self.strategy = strategy

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data

    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_context(self) -> AbstractContextManager[None]:
        if self.precision != "bf16-mixed":
            return nullcontext()
        return torch.autocast(self.strategy.root_device.type, dtype=torch.bfloat16)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Take the step of automatic optimization; a manual one is taken by `ZeROSteps`."""
        result = closure()
        if model.automatic_optimization:
            self.strategy.engine.step()
            # Calls on_before_optimizer_step, whose norm the engine computes in its step.
            self._after_closure(model, optimizer)
        return result
