"""The shortest way of a call that came before: a key read off the arrays, and a launch that lies ready.

A key holds the addresses, shapes and strides of all arrays, the stream and the options: with the dtypes, which are
compared by identity, all that a launch depends on. Nothing here keeps an array alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autodispatch.arrays import Family
from autodispatch.device import cuda_count, import_cupy
from autodispatch.driver import PackedLaunch, launch_kernel
from autodispatch.planning import Ready

Key = tuple[Any, ...] | None
MAX_LAUNCHES = 1 << 14  # kept; a launch takes 2 KB


class Quick(NamedTuple):
    """How calls with one type of array are told apart. A key of None takes the long way."""

    key: Callable[..., Key]
    empty: Callable[[Any, tuple[int, int]], Any]


class QuickLaunch:
    """A packed launch of a problem that is ready, for arrays of one dtype."""

    __slots__ = ("_packed", "configuration", "dtype", "function", "launch", "parameters", "ready")

    def __init__(self, packed: PackedLaunch, dtype: Any, ready: Ready) -> None:
        self.launch = launch_kernel()
        self.configuration, self.function, self.parameters = packed.addresses
        self._packed = packed
        self.dtype = dtype
        self.ready = ready


def quick_for(family: Family, kind: type) -> Quick | None:
    """The short way for arrays of a type; None where there is none."""
    if family.name == "cupy" and kind is family.cupy.ndarray:  # type: ignore[attr-defined]
        return _cupy(family.cupy)  # type: ignore[attr-defined]
    if family.name == "torch" and kind in (family.torch.Tensor, family.torch.nn.Parameter):  # type: ignore[attr-defined]
        return _torch(family.torch)  # type: ignore[attr-defined]
    return None


def _cupy(cupy: Any) -> Quick:
    current_stream = cupy.cuda.get_current_stream
    is_elsewhere = _elsewhere(cupy)

    def key(a: Any, b1: Any, b2: Any, out: Any, *options: Any) -> Key:
        if is_elsewhere is not None and is_elsewhere(a.data.device_id):
            return None
        return (
            a.data.ptr,
            a.shape,
            a.strides,
            b1.data.ptr,
            b1.shape,
            b1.strides,
            b2.data.ptr,
            b2.shape,
            b2.strides,
            None if out is None else (out.data.ptr, out.shape, out.strides),
            current_stream().ptr,
            options,
        )

    return Quick(key, lambda a, shape: cupy.empty(shape, a.dtype))


def _torch(torch: Any) -> Quick:
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:

        def raw_stream(device: int) -> int:
            return int(torch.cuda.current_stream(device).cuda_stream)

    is_elsewhere = _elsewhere(import_cupy())
    is_grad_enabled = torch.is_grad_enabled

    def key(a: Any, b1: Any, b2: Any, out: Any, *options: Any) -> Key:
        if (a.requires_grad or b1.requires_grad or b2.requires_grad) and is_grad_enabled():
            return None
        device = a.get_device()
        if device < 0 or (is_elsewhere is not None and is_elsewhere(device)):
            return None
        return (
            a.data_ptr(),
            a.shape,
            a.stride(),
            b1.data_ptr(),
            b1.shape,
            b1.stride(),
            b2.data_ptr(),
            b2.shape,
            b2.stride(),
            None if out is None else (out.data_ptr(), out.shape, out.stride()),
            raw_stream(device),
            options,
        )

    return Quick(key, lambda a, shape: torch.empty(shape, dtype=a.dtype, device=a.device))


def _elsewhere(cupy: Any) -> Callable[[int], bool] | None:
    """Tells whether a device is not the current one; None where there is one GPU only."""
    if cuda_count() < 2:
        return None
    current = cupy.cuda.runtime.getDevice
    return lambda device: bool(current() != device)
