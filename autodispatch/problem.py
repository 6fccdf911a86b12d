"""Problem, and the checks that turn a call's arguments into one. Nothing here touches a GPU."""

from __future__ import annotations

import math as _math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autodispatch.errors import UnsupportedProblemError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LAYOUTS = ("kn", "nk")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
PRECISIONS = ("ieee", "tf32")
MATHS = ("exact", "fast")
MAX_ALIGNMENT = 16


class Matrix(NamedTuple):
    """What an array is to us: a 2-D strided view of memory on one device. Strides count elements."""

    pointer: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    dtype: str
    device: int | None  # CUDA device index; None is the CPU
    array: Any  # the caller's array, which keeps the memory alive

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything about the matrix that can change the choice of kernel."""
        return (*self[1:7], self.pointer % MAX_ALIGNMENT)

    @property
    def extent(self) -> tuple[int, int]:
        """The half-open range of byte addresses from the lowest to the highest element; empty if there is none."""
        if self.rows == 0 or self.columns == 0:
            return self.pointer, self.pointer
        offsets = ((self.rows - 1) * self.row_stride, (self.columns - 1) * self.column_stride)
        item = ITEM_BYTES[self.dtype]
        return (
            self.pointer + item * sum(o for o in offsets if o < 0),
            self.pointer + item * (1 + sum(o for o in offsets if o > 0)),
        )


@dataclass(frozen=True)
class Problem:
    """One kind of call: out (m, n) = activation(a @ b1) * (a @ b2) with a (m, k), b1 and b2 (k, n).

    Attributes:
        m, n, k: sizes.
        dtype: of all four arrays, `float32`, `float16` or `bfloat16`.
        layout: `kn` if the weights are row-major (k, n), `nk` if they are transposed views of (n, k) storage.
        alignment: bytes (2 to 16) that divide every pointer and every row's offset.
        activation: of the gate: `silu` (SwiGLU), `gelu` or `gelu_tanh` (GeGLU), `relu` (ReGLU), `sigmoid` (GLU).
        precision: `ieee`, or `tf32` where the caller allows it for float32.
        math: `exact` (one rounding, at the store), or `fast` where the caller allows a second one, and the activation's
            approximation for float32.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "kn"
    alignment: int = MAX_ALIGNMENT
    activation: str = "silu"
    precision: str = "ieee"
    math: str = "exact"

    def __post_init__(self) -> None:
        for name, value in (("m", self.m), ("n", self.n), ("k", self.k)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a non-negative integer (got {value!r})")
        check_choice("dtype", self.dtype, tuple(ITEM_BYTES))
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("math", self.math, MATHS)
        if self.alignment not in (2, 4, 8, 16) or self.alignment < self.item_bytes:
            raise ValueError(f"alignment must be {self.item_bytes}, or a power of two up to 16 (got {self.alignment})")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products."""
        return 4 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """The fewest bytes that must cross global memory: inputs read once, out written once."""
        return self.item_bytes * (self.m * self.k + 2 * self.n * self.k + self.m * self.n)

    @property
    def options(self) -> str:
        """The problem as arguments of the command line."""
        words = [f"{self.m},{self.n},{self.k} --dtype {self.dtype} --layout {self.layout}"]
        words += [f"--activation {self.activation}"] if self.activation != ACTIVATIONS[0] else []
        words += [f"--math {self.math}"] if self.math != MATHS[0] else []
        words += [f"--precision {self.precision}"] if self.precision != PRECISIONS[0] else []
        natural = natural_alignment(self.m, self.n, self.k, self.dtype, self.layout)
        words += [f"--alignment {self.alignment}"] if self.alignment != natural else []
        return " ".join(words)

    def __str__(self) -> str:
        plain = ((self.activation, ACTIVATIONS[0]), (self.precision, PRECISIONS[0]), (self.math, MATHS[0]))
        extras = [x for x, default in plain if x != default]
        if self.alignment != MAX_ALIGNMENT:
            extras.append(f"align{self.alignment}")
        return " ".join([f"{self.m},{self.n},{self.k}", self.dtype, self.layout, *extras])


def natural_alignment(m: int, n: int, k: int, dtype: str, layout: str) -> int:
    """The alignment of a call whose four arrays are freshly allocated and packed."""

    def packed(rows: int, columns: int) -> Matrix:
        return canonical(Matrix(0, rows, columns, columns, 1, dtype, None, None))

    weight = packed(k, n) if layout == "kn" else packed(n, k)
    return alignment(Operands(packed(m, k), weight, weight, packed(m, n)))


class Operands(NamedTuple):
    """A call's arrays as kernels read them: row-major, `row_stride` being the leading dimension.

    The weights are in storage orientation: (k, n) for the layout `kn`, (n, k) for `nk`.
    """

    a: Matrix
    b1: Matrix
    b2: Matrix
    out: Matrix


def row_major(x: Matrix) -> bool:
    """Whether rows are contiguous and do not overlap. The stride of an axis of size 1 does not matter."""
    unit = x.column_stride == 1 or x.columns <= 1
    return unit and (x.rows <= 1 or x.row_stride >= x.columns)


def weight_layout(b: Matrix) -> str | None:
    """`kn` or `nk` if kernels can read the weight as it lies, else None (it must be copied)."""
    if row_major(b):
        return "kn"
    return "nk" if row_major(transposed(b)) else None


def transposed(x: Matrix) -> Matrix:
    return x._replace(rows=x.columns, columns=x.rows, row_stride=x.column_stride, column_stride=x.row_stride)


def canonical(x: Matrix) -> Matrix:
    """A row-major matrix with the strides that do not matter set to what a contiguous, aligned one would have."""
    aligned = -(-x.columns // MAX_ALIGNMENT) * MAX_ALIGNMENT
    return x._replace(row_stride=aligned if x.rows <= 1 else x.row_stride, column_stride=1)


def alignment(operands: Operands) -> int:
    """The largest power of two, at most 16, that divides all pointers and row offsets, in bytes."""
    bits = MAX_ALIGNMENT
    for x in operands:
        bits |= x.pointer | x.row_stride * ITEM_BYTES[x.dtype]
    return bits & -bits


def check_shapes(a: Matrix, b1: Matrix, b2: Matrix, out: Matrix | None) -> None:
    """Raises TypeError or ValueError that names the argument, before anything is launched."""
    for name, x in (("b1", b1), ("b2", b2), ("out", out)):
        if x is None:
            continue
        if x.dtype != a.dtype:
            raise TypeError(f"{name} must have the dtype of a, {a.dtype} (got {x.dtype})")
        if x.device != a.device:
            raise ValueError(f"{name} must be on the device of a, {place(a.device)} (got {place(x.device)})")
    m, k, n = a.rows, a.columns, b1.columns
    if b1.rows != k:
        raise ValueError(f"b1 must have as many rows as a has columns, {k} (got shape ({b1.rows}, {b1.columns}))")
    if (b2.rows, b2.columns) != (k, n):
        raise ValueError(f"b2 must have the shape of b1, ({k}, {n}) (got ({b2.rows}, {b2.columns}))")
    if out is None:
        return
    if (out.rows, out.columns) != (m, n):
        raise ValueError(f"out must have shape ({m}, {n}) (got ({out.rows}, {out.columns}))")
    if _overlaps_itself(out):
        raise ValueError("out must not overlap itself (got strides that map two elements to one address)")


def check_overlap(out: Matrix, inputs: tuple[tuple[str, Matrix], ...]) -> None:
    """Raises ValueError if `out` shares memory with an input. Interleaved views that share none are allowed."""
    low, high = out.extent
    for name, x in inputs:
        x_low, x_high = x.extent
        if x_low < high and low < x_high and _share_memory(out, x):
            raise ValueError(f"out must not overlap {name} (got views of the same memory)")


def _overlaps_itself(x: Matrix) -> bool:
    if x.rows * x.columns <= 1:
        return False
    strides = sorted((abs(s), size) for s, size in ((x.row_stride, x.rows), (x.column_stride, x.columns)) if size > 1)
    reach = 0
    for stride, size in strides:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


class _Layout:
    """A strided view at an address that is only ever compared, never read."""

    def __init__(self, x: Matrix) -> None:
        item = ITEM_BYTES[x.dtype]
        self.__array_interface__ = {
            "version": 3,
            "data": (x.pointer, True),
            "shape": (x.rows, x.columns),
            "strides": (x.row_stride * item, x.column_stride * item),
            "typestr": f"|V{item}",
        }


def _share_memory(x: Matrix, y: Matrix) -> bool:
    try:
        return bool(np.shares_memory(np.asarray(_Layout(x)), np.asarray(_Layout(y)), max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def place(device: int | None) -> str:
    return "the CPU" if device is None else f"cuda:{device}"


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")


def check_size(problem: Problem) -> None:
    """Refuses what no launch can express: sizes past 2^31 - 1 along one axis."""
    limit = 2**31 - 1
    for name, value in (("m", problem.m), ("n", problem.n), ("k", problem.k)):
        if value > limit:
            raise UnsupportedProblemError(f"{name} must be at most {limit} (got {value})")


def log2_distance(x: int, y: int) -> float:
    """How many doublings lie between two sizes; 0 for equal ones."""
    return 0.0 if x == y else abs(_math.log2(max(x, 1) / max(y, 1)))
