"""The kernels' activations over the whole range of an fp32 gate, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autodispatch.activations import ACTIVATIONS, MAX_ERROR, MAX_ERROR_EXACT_FLOAT
from autodispatch.device import DeviceInfo
from autodispatch.problem import ITEM_BYTES, Matrix, Problem
from autodispatch.reference import decode, dtype_of
from autodispatch.variants.activation_product import ActivationProduct, Intermediate

pytestmark = pytest.mark.gpu

_COLUMNS, _STRIDE = 1 << 20, 61  # of all 2^32 bit patterns, every 61st, in rows
_SMALLEST = 2.0**-126  # below it results are subnormal, and may be zero


def activate(cupy: Any, device: DeviceInfo, gates: Any, dtype: str, activation: str, math: str) -> Any:
    """activation(gates) * 1 by the kernel of the split path, as float64."""
    n = gates.size
    problem = Problem(1, n, 1, dtype, activation=activation, math=math)
    intermediate = Intermediate(problem, "float32")
    workspace = cupy.ones((2, intermediate.leading_dimension), np.float32)
    workspace[0, :n] = gates
    out = cupy.empty(n, dtype_of(dtype))
    matrix = Matrix(out.data.ptr, 1, n, n, 1, dtype, device.index, out)
    assert out.nbytes == n * ITEM_BYTES[dtype]
    ActivationProduct(problem, device, intermediate)(workspace.data.ptr, matrix, cupy.cuda.get_current_stream())
    return decode(out)


def relative_error(cupy: Any, device: DeviceInfo, activation: str, math: str) -> tuple[float, float]:
    """The largest relative error in fp32, and the gate that has it, over finite gates with a normal result."""
    worst, at = 0.0, 0.0
    total = (1 << 32) // _STRIDE
    for first in range(0, total, _COLUMNS):
        count = min(_COLUMNS, total - first)
        patterns = cupy.arange(first, first + count, dtype=np.uint64) * np.uint64(_STRIDE)
        gates = patterns.astype(np.uint32).view(np.float32)
        gates = gates[cupy.isfinite(gates)]
        if not gates.size:
            continue
        expected = ACTIVATIONS[activation](gates.astype(np.float64))
        actual = activate(cupy, device, gates, "float32", activation, math)
        normal = abs(expected) >= _SMALLEST
        error = cupy.where(normal, abs(actual - expected) / cupy.where(normal, abs(expected), 1.0), 0.0)
        assert bool((abs(actual[~normal]) <= 1.01 * _SMALLEST).all())
        index = int(error.argmax())
        if float(error[index]) > worst:
            worst, at = float(error[index]), float(gates[index])
    return worst, at


@pytest.mark.parametrize(
    ("activation", "math", "bound"),
    [
        ("silu", "exact", MAX_ERROR_EXACT_FLOAT["silu"]),
        ("silu", "fast", MAX_ERROR["silu"]),
        ("gelu", "exact", MAX_ERROR_EXACT_FLOAT["gelu"]),
        ("gelu", "fast", MAX_ERROR["gelu"]),
        ("gelu_tanh", "exact", MAX_ERROR["gelu_tanh"]),
        ("gelu_tanh", "fast", MAX_ERROR["gelu_tanh"]),
        ("sigmoid", "exact", MAX_ERROR_EXACT_FLOAT["sigmoid"]),
        ("sigmoid", "fast", MAX_ERROR["sigmoid"]),
        ("relu", "exact", 0.0),
        ("relu", "fast", 0.0),
    ],
)
def test_the_relative_error_of_an_activation_is_bounded_over_all_gates(
    cupy: Any, device: DeviceInfo, activation: str, math: str, bound: float
) -> None:
    worst, at = relative_error(cupy, device, activation, math)
    print(f"{activation} {math}: {worst:.2e} at a gate of {at:.6g}")
    assert worst <= bound < 1e-4  # which is what fast math promises


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_16_bit_results_are_the_nearest_ones_but_beside_a_tie(
    cupy: Any, device: DeviceInfo, activation: str, dtype: str
) -> None:
    gates = cupy.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype_of(dtype))
    gates = decode(gates)
    gates = gates[cupy.isfinite(gates)]
    expected = ACTIVATIONS[activation](gates)
    actual = activate(cupy, device, gates.astype(np.float32), dtype, activation, "exact")
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    smallest = {"float16": 2.0**-25, "bfloat16": 2.0**-119}[dtype]  # 1 / (1 + exp(-x)) is zero below a gate of -87
    finite = abs(expected) < (65504 if dtype == "float16" else 3e38)
    bound = (unit + MAX_ERROR[activation]) * abs(expected) + smallest
    assert bool((abs(actual - expected) <= bound)[finite].all())


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_limits_of_an_activation_on_the_gpu(cupy: Any, device: DeviceInfo, activation: str, dtype: str) -> None:
    gates = cupy.array([-np.inf, np.inf, np.finfo(np.float32).min, np.nan], np.float32)
    for math in ("exact", "fast"):
        left, right, lowest, nan = activate(cupy, device, gates, dtype, activation, math).get()
        assert left == 0 and lowest == 0 and np.isnan(nan)
        assert right == (1 if activation == "sigmoid" else np.inf)
