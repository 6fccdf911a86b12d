"""Arrays in and out: one family per kind of array, each with its memory, its copies and its current stream.

A kernel sees a `Matrix`; a family knows how to read one off an array, how to allocate beside it, and how to hand a
result back as the caller's kind. Libraries are imported only when an array of theirs arrives.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from autodispatch.device import import_cupy, on_device
from autodispatch.errors import UnsupportedProblemError
from autodispatch.problem import (
    ACTIVATIONS,
    ITEM_BYTES,
    MATHS,
    PRECISIONS,
    Matrix,
    Operands,
    Problem,
    alignment,
    canonical,
    check_choice,
    check_shapes,
    check_size,
    row_major,
    transposed,
    weight_layout,
)

_ALLOWED = ", ".join(sorted(ITEM_BYTES))


class Stream(NamedTuple):
    """A CUDA stream by its handle, in the form that CuPy's launches take."""

    ptr: int


class Family(ABC):
    """What the rest of the package needs from one kind of array.

    Attributes:
        has_quick_calls: whether repeated calls with such arrays are kept, see quick.py.
    """

    name: str
    has_quick_calls: bool = False

    @abstractmethod
    def matrix(self, name: str, array: Any) -> Matrix:
        """The array as a matrix; raises TypeError or ValueError naming the argument."""

    @abstractmethod
    def empty(self, rows: int, columns: int, like: Matrix) -> Any:
        """An uninitialised row-major array with the dtype and on the device of `like`."""

    @abstractmethod
    def workspace(self, nbytes: int, device: int | None) -> tuple[int, Any]:
        """Scratch memory ordered on the current stream: its address, and the object that keeps it alive.

        Raises MemoryError.
        """

    @abstractmethod
    def contiguous(self, array: Any) -> Any:
        """A row-major copy."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """Copies the values of `source` into `target`."""

    def fill_zero(self, array: Any) -> None:
        array[...] = 0

    def stream(self, device: int | None) -> Stream | None:
        """The caller's current stream; None on the CPU."""
        return None

    def result(self, array: Any, like: Any) -> Any:
        """An array of this family as the kind of `like`."""
        return array


class NumpyFamily(Family):
    name = "numpy"

    def matrix(self, name: str, array: Any) -> Matrix:
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name} must be a NumPy array like the other arguments (got {_kind(array)})")
        dtype = _numpy_dtype(name, array.dtype)
        return _matrix(name, array.ctypes.data, array.shape, array.strides, array.itemsize, dtype, None, array)

    def empty(self, rows: int, columns: int, like: Matrix) -> Any:
        return np.empty((rows, columns), like.array.dtype)

    def workspace(self, nbytes: int, device: int | None) -> tuple[int, Any]:
        memory = np.empty(nbytes, np.uint8)
        return memory.ctypes.data, memory

    def contiguous(self, array: Any) -> Any:
        return np.array(array, order="C", subok=False)

    def assign(self, target: Any, source: Any) -> None:
        target[...] = source


class CupyFamily(Family):
    name = "cupy"
    has_quick_calls = True

    def __init__(self) -> None:
        self.cupy = import_cupy()

    def matrix(self, name: str, array: Any) -> Matrix:
        if not isinstance(array, self.cupy.ndarray):
            raise TypeError(f"{name} must be a CuPy array like the other arguments (got {_kind(array)})")
        dtype = _numpy_dtype(name, array.dtype)
        data = array.data
        return _matrix(name, data.ptr, array.shape, array.strides, array.itemsize, dtype, data.device_id, array)

    def empty(self, rows: int, columns: int, like: Matrix) -> Any:
        with on_device(like.device):
            return self.cupy.empty((rows, columns), like.array.dtype)

    def workspace(self, nbytes: int, device: int | None) -> tuple[int, Any]:
        memory = self.cupy.cuda.alloc(nbytes)
        return memory.ptr, memory

    def contiguous(self, array: Any) -> Any:
        with on_device(array.data.device_id):
            return self.cupy.array(array, order="C")

    def assign(self, target: Any, source: Any) -> None:
        with on_device(target.data.device_id):
            self.cupy.copyto(target, source)

    def fill_zero(self, array: Any) -> None:
        with on_device(array.data.device_id):
            array.fill(0)

    def stream(self, device: int | None) -> Stream | None:
        return Stream(self.cupy.cuda.get_current_stream(device).ptr)


class ForeignFamily(CupyFamily):
    """Any other GPU array that speaks DLPack or `__cuda_array_interface__`: CuPy views of the same memory."""

    name = "foreign"
    has_quick_calls = False

    def matrix(self, name: str, array: Any) -> Matrix:
        return super().matrix(name, self._view(name, array))

    def _view(self, name: str, array: Any) -> Any:
        if isinstance(array, self.cupy.ndarray):
            return array
        if hasattr(array, "__dlpack_device__"):
            kind, device = array.__dlpack_device__()
            if int(kind) not in (2, 13):  # CUDA and CUDA managed memory, in DLPack's numbering
                raise TypeError(f"{name} must be on a GPU (got {_kind(array)} on DLPack device type {int(kind)})")
            with on_device(int(device)):
                return self.cupy.from_dlpack(array)
        if hasattr(array, "__cuda_array_interface__"):
            return self.cupy.asarray(array)
        raise TypeError(f"{name} must be a GPU array like the other arguments (got {_kind(array)})")

    def result(self, array: Any, like: Any) -> Any:
        if hasattr(like, "__array_namespace__"):
            return like.__array_namespace__().from_dlpack(array)
        root = sys.modules.get(type(like).__module__.partition(".")[0])
        if root is not None and hasattr(root, "from_dlpack"):
            return root.from_dlpack(array)
        if root is not None and hasattr(root, "cuda") and hasattr(root.cuda, "as_cuda_array"):
            return root.cuda.as_cuda_array(array)
        return array


class TorchFamily(Family):
    name = "torch"
    has_quick_calls = True

    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]
        torch = self.torch
        self._dtypes = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

    def matrix(self, name: str, array: Any) -> Matrix:
        if not isinstance(array, self.torch.Tensor):
            raise TypeError(f"{name} must be a PyTorch tensor like the other arguments (got {_kind(array)})")
        if array.device.type != "cuda":
            raise TypeError(f"{name} must be on a GPU (got a PyTorch tensor on {array.device}; use NumPy for the CPU)")
        if array.requires_grad and self.torch.is_grad_enabled():
            raise UnsupportedProblemError(
                f"{name} must not require grad, since no backward is recorded; "
                "call under torch.no_grad() or pass a detached tensor (got requires_grad=True)"
            )
        dtype = self._dtypes.get(array.dtype)
        if dtype is None:
            raise TypeError(f"{name} must have a dtype out of {_ALLOWED} (got {array.dtype})")
        strides = tuple(s * array.element_size() for s in array.stride())
        return _matrix(
            name, array.data_ptr(), tuple(array.shape), strides, array.element_size(), dtype, array.device.index, array
        )

    def empty(self, rows: int, columns: int, like: Matrix) -> Any:
        return self.torch.empty((rows, columns), dtype=like.array.dtype, device=like.array.device)

    def workspace(self, nbytes: int, device: int | None) -> tuple[int, Any]:
        try:
            memory = self.torch.empty(nbytes, dtype=self.torch.uint8, device=f"cuda:{device}")
        except self.torch.cuda.OutOfMemoryError as cause:
            raise MemoryError(str(cause)) from cause
        return memory.data_ptr(), memory

    def contiguous(self, array: Any) -> Any:
        return array.detach().clone(memory_format=self.torch.contiguous_format)

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def fill_zero(self, array: Any) -> None:
        array.zero_()

    def stream(self, device: int | None) -> Stream | None:
        return Stream(self.torch.cuda.current_stream(device).cuda_stream)


_families: dict[str, Family] = {}


def family_of(array: Any) -> Family:
    """The family of a call's first argument; the other arguments must belong to it too."""
    if isinstance(array, np.ndarray):
        return _family("numpy", NumpyFamily)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, getattr(torch, "Tensor", ())):
        return _family("torch", TorchFamily)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, getattr(cupy, "ndarray", ())):
        return _family("cupy", CupyFamily)
    if hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack_device__"):
        return _family("foreign", ForeignFamily)
    raise TypeError(
        "a must be a CuPy array, a PyTorch tensor, another GPU array with DLPack or __cuda_array_interface__, "
        f"or a NumPy array for the CPU (got {_kind(array)})"
    )


def _family(name: str, kind: type[Family]) -> Family:
    if name not in _families:
        _families[name] = kind()
    return _families[name]


class Settlement(NamedTuple):
    """How a call's arrays become operands: the layout, and what must be copied first, with the reason."""

    layout: str
    copied: tuple[tuple[str, str], ...]


def settle(a: Matrix, b1: Matrix, b2: Matrix, out: Matrix | None) -> Settlement:
    """Decides from shapes and strides alone, so that the decision can be kept with the key of a call."""
    copied = []
    if not row_major(a):
        copied.append(("a", "its rows are not contiguous"))
    layouts = (weight_layout(b1), weight_layout(b2))
    layout = layouts[0] or layouts[1] or "kn"
    for name, b, own in (("b1", b1, layouts[0]), ("b2", b2, layouts[1])):
        if own is None:
            copied.append((name, "neither of its axes is contiguous"))
        elif own != layout and not (layout == "nk" and row_major(transposed(b))):
            copied.append((name, f"its layout is {own} and that of the other weight is {layout}"))
    if out is not None and not row_major(out):
        copied.append(("out", "its rows are not contiguous, so the result is written beside it and copied"))
    return Settlement(layout, tuple(copied))


def planned(a: Matrix, b1: Matrix, b2: Matrix, out: Matrix | None, settlement: Settlement) -> Operands:
    """The operands as `operands` will make them, with address 0 and packed rows for what is yet to be allocated."""
    names = {name for name, _ in settlement.copied}
    new = out is None or "out" in names
    out = a._replace(pointer=0, rows=a.rows, columns=b1.columns, row_stride=b1.columns) if new or out is None else out
    found = []
    for name, x in (("a", a), ("b1", b1), ("b2", b2)):
        if name != "a" and settlement.layout == "nk":
            x = transposed(x)
        found.append(canonical(x._replace(pointer=0, row_stride=x.columns) if name in names else x))
    return Operands(found[0], found[1], found[2], canonical(out))


def describe(
    a: Matrix,
    b1: Matrix,
    b2: Matrix,
    out: Matrix | None,
    activation: str = "silu",
    math: str = "exact",
    precision: str | None = None,
) -> tuple[Problem, Settlement]:
    """The problem of a call and what must be copied for it. Raises TypeError or ValueError naming the argument."""
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("math", math, MATHS)
    check_choice("precision", precision or "ieee", PRECISIONS)
    check_shapes(a, b1, b2, out)
    settlement = settle(a, b1, b2, out)
    problem = Problem(
        m=a.rows,
        n=b1.columns,
        k=a.columns,
        dtype=a.dtype,
        layout=settlement.layout,
        alignment=alignment(planned(a, b1, b2, out, settlement)),
        activation=activation,
        precision=precision if precision and a.dtype == "float32" else "ieee",
        math=math,
    )
    check_size(problem)
    return problem, settlement


def operands(family: Family, a: Matrix, b1: Matrix, b2: Matrix, out: Matrix, settlement: Settlement) -> Operands:
    """Copies what must be copied, and returns all four in the form that kernels read.

    `out` must be row-major already. A copied weight is brought into the layout of the settlement.
    """
    names = {name for name, _ in settlement.copied}
    if "a" in names:
        a = family.matrix("a", family.contiguous(a.array))
    weights = []
    for name, b in (("b1", b1), ("b2", b2)):
        if name in names:
            array = b.array
            array = family.contiguous(array.T).T if settlement.layout == "nk" else family.contiguous(array)
            b = family.matrix(name, array)
        weights.append(canonical(transposed(b) if settlement.layout == "nk" else b))
    return Operands(canonical(a), weights[0], weights[1], canonical(out))


def _matrix(
    name: str,
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    dtype: str,
    device: int | None,
    array: Any,
) -> Matrix:
    if len(shape) != 2:
        raise ValueError(f"{name} must have 2 dimensions (got shape {tuple(shape)})")
    if pointer % item or strides[0] % item or strides[1] % item:
        raise ValueError(f"{name} must be aligned to its item size of {item} bytes, also from row to row")
    return Matrix(pointer, shape[0], shape[1], strides[0] // item, strides[1] // item, dtype, device, array)


_dtype_names: dict[Any, str] = {}  # NumPy builds a name anew at every look


def _numpy_dtype(name: str, dtype: Any) -> str:
    known = _dtype_names.get(dtype)
    if known is None:
        if dtype.name not in ITEM_BYTES or not dtype.isnative:
            raise TypeError(f"{name} must have a dtype out of {_ALLOWED}, in native byte order (got {dtype!s})")
        known = _dtype_names.setdefault(dtype, str(dtype.name))
    return known


def _kind(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
