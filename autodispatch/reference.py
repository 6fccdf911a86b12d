"""The golden reference in float64, the tolerance that follows from the number formats, and the check of a candidate.

A result is right if every element is within one final rounding of the true value plus what fp32 accumulation may add.
A sum of k products in fp32 is off by at most gamma * sum(|a| * |b|), with gamma = min(k, 8 sqrt(k)) * 2^-23. The square
root is the probabilistic bound of Higham and Mary (SIAM J. Sci. Comput. 41, 2019); it is 2^-23 rather than 2^-24 since
tensor cores truncate. The error of the gate passes through the activation with its largest slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autodispatch.activations import ACTIVATIONS, MAX_ERROR, MAX_ERROR_EXACT_FLOAT, MAX_SLOPE
from autodispatch.arrays import Family, family_of, operands, settle
from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo, import_cupy, on_device
from autodispatch.errors import UnsupportedProblemError
from autodispatch.launch import LaunchConfig, pointer, round_up, size
from autodispatch.problem import ITEM_BYTES, Operands, Problem
from autodispatch.source import load
from autodispatch.variants.base import KERNEL_TYPES

# half the distance between neighbouring values near 1, and half the smallest subnormal (fp32 results are flushed)
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-25, "bfloat16": 2.0**-126}
_PRODUCT = 2.0**-22  # of activation and up projection, in fp32
_WRITTEN = "bytes around the output were written"
_THREADS, _BLOCKS_PER_SM = 256, 4  # of kernels/compare.cu
_MAX_CHECKED = 1 << 28  # outputs; of a larger result, rows at both ends and between are checked


@dataclass(frozen=True)
class Check:
    """How a result compares.

    `relative_error` is the norm of the difference over the norm of the reference; `max_error` the largest difference
    over the reference's root mean square. None where nothing could be compared.
    """

    status: str
    reason: str = ""
    relative_error: float | None = None
    max_error: float | None = None


@dataclass(frozen=True)
class Inputs:
    """One set of arguments on a device, as a caller would hand them over: b1 and b2 are (k, n) views."""

    a: Any
    b1: Any
    b2: Any


def array_module(device: DeviceInfo) -> Any:
    return np if device.kind == "cpu" else import_cupy()


def dtype_of(name: str) -> Any:
    """The NumPy dtype of a name; bfloat16 comes from ml-dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as cause:
        raise UnsupportedProblemError("bfloat16 arrays need the package ml-dtypes; install it") from cause
    return np.dtype(ml_dtypes.bfloat16)


def make_inputs(problem: Problem, device: DeviceInfo, seed: int = 0) -> Inputs:
    """Seeded normal data, weights scaled by 1/sqrt(k), with the problem's layout and exactly its alignment."""
    xp = array_module(device)
    with on_device(device.index):
        rng = xp.random.default_rng(seed)
        scale = max(problem.k, 1) ** -0.5
        a = _strided(xp, rng, problem.m, problem.k, 1.0, problem)
        if problem.layout == "kn":
            b1, b2 = (_strided(xp, rng, problem.k, problem.n, scale, problem) for _ in range(2))
        else:
            b1, b2 = (_strided(xp, rng, problem.n, problem.k, scale, problem).T for _ in range(2))
    return Inputs(a, b1, b2)


def _strided(xp: Any, rng: Any, rows: int, columns: int, scale: float, problem: Problem) -> Any:
    """Random values in rows whose offset in bytes is an odd multiple of the alignment (any multiple of 16 for 16)."""
    item = problem.item_bytes
    offset = 0 if problem.alignment == 16 else problem.alignment // item
    per_row = round_up(columns, 16 // item) + offset
    values = rng.standard_normal(rows * per_row + offset, dtype=np.float32) * np.float32(scale)
    if problem.dtype == "bfloat16":  # cut, not rounded, which takes five array operations to compile: any value will do
        values = values.view(np.uint16)[1::2].copy().view(dtype_of("bfloat16"))
    else:
        values = encode(values, problem.dtype)
    return values[offset:].reshape(rows, per_row)[:, :columns]


def encode(values: Any, dtype: str) -> Any:
    """float32 values rounded to a dtype, to nearest even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16).view(dtype_of("bfloat16"))


def decode(array: Any) -> Any:
    """An array of a supported type, of one axis or two, as float64, exactly."""
    if array.dtype.name != "bfloat16":
        return array.astype(np.float64)
    if array.ndim == 2 and array.strides[0] < array.strides[1]:
        return decode(array.T).T  # as it lies
    xp = np if isinstance(array, np.ndarray) else import_cupy()
    single = xp.zeros(array.shape, np.float32)
    if array.size:
        single.view(np.uint16)[..., 1::2] = array.view(np.uint16)  # the upper half
    return single.astype(np.float64)


def reference(a: Any, b1: Any, b2: Any, problem: Problem) -> tuple[Any, Any]:
    """The true result in float64 and the tolerance of each element, (rows of a, n) both."""
    a, b1, b2 = decode(a), decode(b1), decode(b2)
    with np.errstate(all="ignore"):
        c1, c2 = a @ b1, a @ b2
        spread1, spread2 = abs(a) @ abs(b1), abs(a) @ abs(b2)
        gate = ACTIVATIONS[problem.activation](c1)
        expected = gate * c2
        gamma = min(problem.k, 8 * problem.k**0.5) * 2.0**-23
        if problem.precision == "tf32":
            gamma += 2.0**-10  # both factors cut to 10 bits of mantissa
        error1, error2 = gamma * spread1, gamma * spread2
        if problem.math == "fast":
            error1, error2 = error1 + UNIT_ROUNDOFF["bfloat16"] * abs(c1), error2 + UNIT_ROUNDOFF["bfloat16"] * abs(c2)
        slope = MAX_SLOPE[problem.activation]
        propagated = slope * error1 * (abs(c2) + error2) + abs(gate) * error2
        rounding = UNIT_ROUNDOFF[problem.dtype]
        exact = problem.math == "exact" and problem.dtype == "float32"
        evaluation = _PRODUCT + (MAX_ERROR_EXACT_FLOAT if exact else MAX_ERROR)[problem.activation]
        tolerance = (rounding + evaluation) * abs(expected) + (1 + rounding) * propagated + SMALLEST[problem.dtype]
    return expected, tolerance


class _Tally(NamedTuple):
    """What a comparison counted; `first` is the flat index of the first wrong element, sums are over finite pairs."""

    touched: float  # guard elements that were written
    wrong: float
    first: float
    finite: float
    squares: float  # of the reference
    off_squares: float  # of the differences
    most_off: float

    def errors(self) -> tuple[float, float]:
        """The relative and the maximum error, see Check."""
        norm = self.squares**0.5
        relative = self.off_squares**0.5 / norm if norm > 0 else 0.0
        return relative, self.most_off / (norm / max(1.0, self.finite) ** 0.5) if norm > 0 else 0.0


def compare(xp: Any, actual: Any, expected: Any, tolerance: Any, dtype: str) -> Check:
    """Checks a decoded result against the reference: NaN exactly where it has NaN, overflow to the same infinity, all
    else within the tolerance. kernels/compare.cu does the same in one pass."""
    largest = float(np.finfo(np.float16).max) if dtype == "float16" else float(np.finfo(np.float32).max)
    with np.errstate(all="ignore"):
        difference = abs(actual - expected)
        same_infinity = xp.isinf(actual) & (actual == expected)
        # a finite value past the largest of the type, less its tolerance, may round to infinity
        overflow = (
            xp.isinf(actual)
            & xp.isfinite(tolerance)
            & (abs(expected) + tolerance >= largest)
            & (xp.sign(actual) == xp.sign(expected))
        )
        both_nan = xp.isnan(actual) & xp.isnan(expected)
        near = xp.isfinite(expected) & xp.isfinite(tolerance) & (difference <= tolerance)
        # where an infinite term leaves no tolerance but the value is finite, it is an exact one
        exact = xp.isfinite(expected) & ~xp.isfinite(tolerance) & (actual == expected)
        wrong = ~(near | exact | same_infinity | overflow | both_nan)
        finite = xp.isfinite(actual) & xp.isfinite(expected)
        off = xp.where(finite, difference, 0.0)
        squares = xp.sum(xp.where(finite, expected, 0.0) ** 2)
        counts = (xp.count_nonzero(wrong), wrong.argmax(), xp.count_nonzero(finite), squares, xp.sum(off**2), off.max())
    return _verdict(_Tally(0.0, *map(float, counts)), actual, expected, tolerance)


def _verdict(tally: _Tally, actual: Any, expected: Any, tolerance: Any) -> Check:
    """The check that a tally amounts to."""
    if tally.touched:
        return Check("out_of_bounds", _WRITTEN)
    if not tally.wrong:
        return Check("ok", "", *tally.errors())
    row, column = divmod(int(tally.first), expected.shape[1])
    reason = (
        f"{tally.wrong:.0f} of {expected.size} elements are outside the tolerance; the first at ({row}, {column}): "
        f"expected {float(expected[row, column]):.6g} +- {float(tolerance[row, column]):.2g} "
        f"(got {float(actual[row, column]):.6g})"
    )
    return Check("wrong_result", reason, *tally.errors())


class GuardedOutput:
    """An output inside a larger buffer: every byte starts as 0xFF, which is NaN in each dtype, and what surrounds the
    output must still be so after a candidate ran."""

    GUARD = 64  # elements before and after, and beside every row

    def __init__(self, xp: Any, problem: Problem) -> None:
        item = ITEM_BYTES[problem.dtype]
        offset = 0 if problem.alignment == 16 else problem.alignment // item
        self.stride = round_up(problem.n + self.GUARD, 16 // item) + offset
        self.start = self.GUARD + offset
        self._shape = (problem.m, problem.n)
        self._bytes = xp.full((2 * self.GUARD + problem.m * self.stride + offset) * item, 0xFF, np.uint8)
        self.buffer = self._bytes.view(dtype_of(problem.dtype))
        body = self.buffer[self.start : self.start + problem.m * self.stride]
        self.array = body.reshape(problem.m, self.stride)[:, : problem.n]

    def poison(self) -> None:
        self._bytes.fill(0xFF)

    def intact(self, xp: Any) -> bool:
        """Whether nothing outside the output was written."""
        unsigned = self.buffer.view(np.uint16 if self.buffer.itemsize == 2 else np.uint32)
        m, n = self._shape
        body = unsigned[self.start : self.start + m * self.stride].reshape(m, self.stride)
        untouched = np.array(-1, np.int64).astype(unsigned.dtype)
        parts = (unsigned[: self.start], unsigned[self.start + m * self.stride :], body[:, n:])
        return all(bool((part == untouched).all()) for part in parts)


class Checker:
    """Checks candidates of one problem on one set of inputs; the reference is computed once."""

    def __init__(self, problem: Problem, device: DeviceInfo, seed: int = 1) -> None:
        self.problem, self.device = problem, device
        self.xp = array_module(device)
        with on_device(device.index):
            self.inputs = make_inputs(problem, device, seed)
            self.output = GuardedOutput(self.xp, problem)
            self.family: Family = family_of(self.inputs.a)
            self.operands = bind(self.family, self.inputs, self.output.array)
            self._rows = self._checked_rows()
            parts = [reference(self.inputs.a[r], self.inputs.b1, self.inputs.b2, problem) for r in self._rows]
            self._expected, self._tolerance = (self._joined([p[i] for p in parts]) for i in range(2))
            slots = np.full(problem.m, -1, np.int32)  # of a row, which one of the checked rows it is
            slots[np.r_[tuple(self._rows)]] = np.arange(len(self._expected))
            self._slots = self.xp.asarray(slots)

    def _checked_rows(self) -> list[slice]:
        m, n = self.problem.m, self.problem.n
        if m * n <= _MAX_CHECKED:
            return [slice(0, m)]
        height = max(1, min(m // 8, _MAX_CHECKED // (8 * n)))
        return [slice(start, start + height) for start in np.linspace(0, m - height, 8).astype(int).tolist()]

    def poison(self) -> None:
        with on_device(self.device.index):
            self.output.poison()

    def result(self) -> Any:
        """The output as float64 on the host."""
        with on_device(self.device.index):
            values = decode(self.output.array)
            return values if self.xp is np else values.get()

    def verdict(self) -> Check:
        """Compares what a candidate left in the output."""
        if self.device.kind == "cuda":
            with on_device(self.device.index):
                tally = self._tally()
                return _verdict(tally, self._actual() if tally.wrong else None, self._expected, self._tolerance)
        if not self.output.intact(self.xp):
            return Check("out_of_bounds", _WRITTEN)
        return compare(self.xp, self._actual(), self._expected, self._tolerance, self.problem.dtype)

    def _actual(self) -> Any:
        return self._joined([decode(self.output.array[r]) for r in self._rows])

    def _joined(self, parts: list[Any]) -> Any:
        """One array, row-major as products are: a copy only where there are several parts."""
        return parts[0] if len(parts) == 1 else self.xp.concatenate(parts)

    def _tally(self) -> _Tally:
        """By one kernel, since each of the array operations would be compiled by itself on a machine that is new."""
        xp, output, (m, n) = self.xp, self.output, self.output.array.shape
        kernel = compile_kernel(KernelSpec(load("compare"), (("T", KERNEL_TYPES[self.problem.dtype]),)), self.device)
        blocks = min(m + 2, _BLOCKS_PER_SM * self.device.sm_count)
        tallies = xp.empty((blocks, len(_Tally._fields)))
        sizes = (size(x) for x in (output.buffer.size, output.start, output.stride, m, n))
        others = (pointer(x.data.ptr) for x in (self._slots, self._expected, self._tolerance, tallies))
        kernel(LaunchConfig((blocks, 1), _THREADS), (pointer(output.buffer.data.ptr), *sizes, *others), None)
        found = tallies.get()
        first, most_off = found[:, 2].min(), found[:, 6].max()
        touched, wrong, finite, squares, off_squares = found[:, (0, 1, 3, 4, 5)].sum(0)
        return _Tally(touched, wrong, first, finite, squares, off_squares, most_off)


def bind(family: Family, inputs: Inputs, out: Any) -> Operands:
    """The operands of a candidate for these arrays."""
    a, b1, b2 = (family.matrix(name, getattr(inputs, name)) for name in ("a", "b1", "b2"))
    out_matrix = family.matrix("out", out)
    return operands(family, a, b1, b2, out_matrix, settle(a, b1, b2, out_matrix))
