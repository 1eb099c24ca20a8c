"""A device that computes on the CPU but refuses to mix with CPU tensors, as a GPU does.

Importing this module registers the device type ``pretend``. Its tensors keep a CPU tensor inside;
every operator is run on those. Within `pretend_device` it can be used like ``cuda``, and the
operations for which the host would have to wait for a GPU are counted.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

DEVICE = torch.device("pretend:0")
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
TAKE_CPU_INDICES = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    aten._index_put_impl_.default,
}
READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default),
    *(aten.equal.default, aten._unique2.default, aten.masked_scatter_backward.default),
}
"""Operators whose result, or the shape of it, the host needs."""

waits: Counter[str] = Counter()
"""``file.py function`` of the project -> how often the host would have waited there for a GPU."""


class PretendTensor(torch.Tensor):
    """A tensor on the device; ``inner`` is the CPU tensor with its values."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: PretendTensor) -> None:
        self.inner = value.inner
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)  # a checkpoint is read on the CPU

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled():  # only autograd splits operators into basic ones
            result = operator.decompose(*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        return _run(operator, args, kwargs or {})


def _run(operator, args, kwargs):
    _refuse_mixed(operator, args, kwargs)
    goes_to_host = _goes_to_host(operator, args, kwargs)
    is_read = operator in READS or _selects_by_mask(operator, args)
    if goes_to_host or is_read or _waits_for_upload(operator, args, kwargs):
        waits[_place()] += 1
    if _is_pretend(kwargs.get("device")):
        kwargs = kwargs | {"device": torch.device("cpu")}
    if operator is aten.histc.default:  # a GPU counts integers, too
        args = (args[0].float(), *args[1:])
    bare_kwargs = {key: _inner(value) for key, value in kwargs.items()}
    result = operator(*map(_inner, args), **bare_kwargs)
    if args and result is _inner(args[0]):  # in place
        return args[0]
    return result if goes_to_host else _outer(result)


def _inner(value: Any) -> Any:
    """Return a value, or nested ones, with the CPU tensors inside; torch's own needs far longer."""
    if isinstance(value, PretendTensor):
        return value.inner
    return type(value)(map(_inner, value)) if isinstance(value, (list, tuple)) else value


def _outer(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return PretendTensor(value)
    return type(value)(map(_outer, value)) if isinstance(value, (list, tuple)) else value


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _refuse_mixed(operator, args, kwargs) -> None:
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    ours = [one for one in tensors if isinstance(one, PretendTensor)]
    foreign = [one for one in tensors if not isinstance(one, PretendTensor) and one.dim()]
    if not ours or not foreign or operator in COPIES:
        return
    if operator in TAKE_CPU_INDICES and isinstance(args[0], PretendTensor):
        return
    raise RuntimeError(f"Expected all tensors to be on the same device, in {operator}")


def _goes_to_host(operator, args, kwargs) -> bool:
    if operator is aten.copy_.default:
        return not isinstance(args[0], PretendTensor)
    target = kwargs.get("device")
    is_copy = operator is aten._to_copy.default and isinstance(args[0], PretendTensor)
    return is_copy and target is not None and not _is_pretend(target)


def _waits_for_upload(operator, args, kwargs) -> bool:
    """Return whether a tensor of the CPU is moved here in a way that waits for the stream."""
    source = {aten._to_copy.default: 0, aten.copy_.default: 1}.get(operator)
    if source is None or isinstance(args[source], PretendTensor):
        return operator in TAKE_CPU_INDICES and any(
            not isinstance(one, PretendTensor) for one in _tensors(args[1])
        )
    is_async = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
    return not is_async


def _selects_by_mask(operator, args) -> bool:
    """Return whether a mask on the device decides how many elements are read or written."""
    return operator in TAKE_CPU_INDICES and any(
        isinstance(one, PretendTensor) and one.dtype == torch.bool for one in _tensors(args[1])
    )


def _is_pretend(device: Any) -> bool:
    return device is not None and torch.device(device).type == "pretend"


def _place() -> str:
    """Return the innermost function of the project that is running."""
    for frame in reversed(traceback.extract_stack()):
        if "/lit_grpo/" in frame.filename:
            return f"{frame.filename.partition('/lit_grpo/')[2]} {frame.name}"
    return "elsewhere"


_library = torch.library.Library("_", "IMPL")
_library.fallback(
    lambda operator, *args, **kwargs: _run(operator, args, kwargs), dispatch_key="PrivateUse1"
)


class _AsOnAGpu(TorchFunctionMode):
    """Replace what torch cannot do with tensors of such a device, though it can with a GPU's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _device_constructors() and _is_pretend(kwargs.get("device")):
            requires_grad = kwargs.pop("requires_grad", False)
            made = function(*args, **kwargs | {"device": "cpu"})
            return made.to(DEVICE, non_blocking=True).requires_grad_(requires_grad)
        if args and isinstance(args[0], PretendTensor):
            if function is torch.Tensor.tolist:
                return args[0].cpu().tolist()
            if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                args = (args[0], _with_tensors(args[1]), *args[2:])
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function == torch.Tensor.data.__set__ and isinstance(args[1], PretendTensor):
            return _set_data(*args)
        return function(*args, **kwargs)


def _set_data(tensor: torch.Tensor, data: PretendTensor) -> None:
    if isinstance(tensor, PretendTensor):
        tensor.data = data
    elif isinstance(tensor, torch.nn.Parameter):
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(data, tensor.requires_grad))
    else:
        torch.utils.swap_tensors(tensor, data)


def _with_tensors(index: Any) -> Any:
    """Return an index with tensors in place of lists."""
    if isinstance(index, list):
        return torch.tensor(index)
    return tuple(map(_with_tensors, index)) if isinstance(index, tuple) else index


@contextmanager
def pretend_device() -> Iterator[Counter[str]]:
    """Make the device usable; yield how often the host had to wait, by place in the project."""
    waits.clear()
    with _AsOnAGpu():
        yield waits


class PretendAccelerator(Accelerator):
    """What Lightning needs to know of the device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE] * len(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretend"


def pretend_strategy() -> SingleDeviceStrategy:
    """Return the strategy of a trainer on the device; it contains the accelerator."""
    return SingleDeviceStrategy(device=DEVICE, accelerator=PretendAccelerator())
