"""AdamW for bfloat16 weights, on float32 copies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lit_grpo.types import check_range, setting_error

MAX_VALUES = 2**26
"""Values of the weights whose gradients are in float32 at the same time: 256 MiB."""


class MasterAdamW(Optimizer):
    """AdamW that updates a float32 copy of each bfloat16 weight, its master.

    bfloat16 has 8 bits of precision: a change below 1/512 of a weight is rounded away, and at a
    learning rate of 1e-6 nearly all changes are. Here changes add up in the masters, and after
    each step the weights are the masters, rounded. A master starts as the weight itself. Weights
    in float32 need none, and are updated as by ``torch.optim.AdamW``.

    Masters and moments take 12 bytes per trained bfloat16 weight.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights per step and learning rate.
        fused: Whether to use torch's fused kernels; null leaves the choice to it.

    Raises:
        UserError: a setting is out of range.
    """

    takes_over = ("AdamW",)
    """Classes whose state it loads at a resume, where it is not sharded."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        fused: bool | None = None,
    ) -> None:
        key = "model.optimizer.init_args"
        check_range(f"{key}.lr", lr, at_least=0)
        check_range(f"{key}.eps", eps, at_least=0)
        check_range(f"{key}.weight_decay", weight_decay, at_least=0)
        if not all(0 <= one < 1 for one in betas):
            raise setting_error(f"{key}.betas", "two numbers >= 0 and < 1", list(betas))
        settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, {"lr": lr} | settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on the masters, and round the weights from them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in _parts([one for one in group["params"] if one.grad is not None]):
                self._step(weights, group)
        return loss

    @property
    def step_bytes(self) -> int:
        """Bytes that exist only during a step: gradients in float32, and roots unless fused."""
        sizes = [
            sum(one.numel() for one in weights) * (1 if group["fused"] else 2)
            for group in self.param_groups
            for weights in _parts(group["params"])
        ]
        return 4 * max(sizes, default=0)

    def _step(self, weights: list[Tensor], group: Mapping[str, Any]) -> None:
        states = [self._state_of(one, group) for one in weights]
        masters = [
            state.get("master", weight) for state, weight in zip(states, weights, strict=True)
        ]
        beta1, beta2 = group["betas"]
        adamw(
            masters,
            [one.grad.float() for one in weights if one.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        rounded = [
            (weight, state["master"])
            for weight, state in zip(weights, states, strict=True)
            if "master" in state
        ]
        if rounded:
            targets, sources = zip(*rounded, strict=True)
            torch._foreach_copy_(targets, sources)

    def _state_of(self, weight: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a weight, which starts at its first step."""
        state: dict[str, Any] = self.state[weight]
        if not state:
            # The fused kernels read it on the device, the others on the CPU.
            device = weight.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
        if weight.dtype != torch.float32 and "master" not in state:
            state["master"] = weight.detach().float()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, including a ``torch.optim.AdamW``'s.

        The base class would round masters and moments to the type of the weights.
        """
        super().load_state_dict(state_dict | {"state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group in self.param_groups:
            for weight in group["params"]:
                saved = state_dict["state"].get(next(numbers))
                if saved is not None:
                    self.state[weight] = _placed(saved, weight, group)


def _placed(saved: Mapping[str, Any], weight: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved state of a weight in float32, on its device."""
    state = {
        name: saved[name].to(weight.device, torch.float32)
        for name in ("exp_avg", "exp_avg_sq", "master")
        if name in saved and not (name == "master" and weight.dtype == torch.float32)
    }
    device = weight.device if group["fused"] else "cpu"
    return state | {"step": torch.as_tensor(saved["step"], dtype=torch.float32, device=device)}


def _parts(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split weights into lists of up to `MAX_VALUES` values, or of one weight."""
    part: list[Tensor] = []
    for weight in weights:
        if part and sum(one.numel() for one in part) + weight.numel() > MAX_VALUES:
            yield part
            part = []
        part.append(weight)
    if part:
        yield part
