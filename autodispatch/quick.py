"""The shortest way of a call that came before: a key read off the arrays, and a launch that lies ready.

A key holds the addresses, shapes and strides of all arrays, the stream and the options: with the dtypes, which are
compared by identity, all that a launch depends on. Nothing here keeps an array alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autodispatch.arrays import CupyFamily, Family, TorchFamily
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


class QuickCalls:
    """The launches that are kept, and the shapes of the results that calls without `out` ask for.

    Attributes:
        kinds: how calls are told apart, by the type of their first array.
    """

    def __init__(self) -> None:
        self.kinds: dict[type, Quick] = {}
        self.launches: dict[Key, QuickLaunch] = {}
        self.shapes: dict[Key, tuple[int, int]] = {}

    def remember(
        self,
        family: Family,
        packed: PackedLaunch,
        ready: Ready,
        inputs: tuple[Any, Any, Any],
        out: Any,
        result: Any,
        options: tuple[Any, ...],
    ) -> None:
        """Keeps the launch of a call for the next one with the same arrays; `out` is None where the result is new."""
        kind = type(inputs[0])
        quick = self.kinds.get(kind) or _quick_for(family, kind)
        key = quick.key(*inputs, result, *options) if quick is not None else None
        if quick is None or key is None:
            return
        self.kinds[kind] = quick
        if len(self.launches) >= MAX_LAUNCHES:
            self.clear()
        self.launches[key] = QuickLaunch(packed, inputs[0].dtype, ready)
        if out is None:
            self.shapes[quick.key(*inputs, None, *options)] = tuple(result.shape)

    def clear(self) -> None:
        """Forgets all launches; the next calls go the long way."""
        self.launches.clear()
        self.shapes.clear()


def _quick_for(family: Family, kind: type) -> Quick | None:
    """The short way for arrays of a type; None where there is none."""
    if isinstance(family, TorchFamily) and kind in (family.torch.Tensor, family.torch.nn.Parameter):
        return _torch(family.torch)
    if family.name == "cupy" and isinstance(family, CupyFamily) and kind is family.cupy.ndarray:
        return _cupy(family.cupy)
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
        wants_grad = a.requires_grad or b1.requires_grad or b2.requires_grad or (out is not None and out.requires_grad)
        if wants_grad and is_grad_enabled():
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
