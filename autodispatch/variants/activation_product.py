"""The second step of every split variant: out = activation(c1) * c2 by kernels/activation_product.cu."""

from __future__ import annotations

from typing import Any

from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_Y, LaunchConfig, ceil_div, pointer, round_up, size
from autodispatch.problem import ITEM_BYTES, Matrix, Problem
from autodispatch.source import load
from autodispatch.variants.base import KERNEL_TYPES

_TILE_M = 8
_VECTOR = 4


def intermediate_dtypes(problem: Problem) -> tuple[str, ...]:
    """In which types c1 and c2 may be kept: fp32, and bf16 where the caller allows a second rounding of bf16 data."""
    fast = problem.math == "fast" and problem.dtype == "bfloat16"
    return ("float32", "bfloat16") if fast else ("float32",)


class Intermediate:
    """c1 and c2, one after the other in the workspace, with rows padded to 16 bytes."""

    def __init__(self, problem: Problem, dtype: str) -> None:
        self.dtype = dtype
        self.leading_dimension = round_up(problem.n, 8)
        self.matrix_bytes = problem.m * self.leading_dimension * ITEM_BYTES[dtype]
        self.total_bytes = 2 * self.matrix_bytes


def activation_product_spec(problem: Problem, intermediate_dtype: str) -> KernelSpec:
    """The kernel instance; it moves vectors where the problem's alignment lets `out` be written so."""
    vector = _VECTOR if problem.alignment >= _VECTOR * problem.item_bytes else 1
    values = {
        "C": KERNEL_TYPES[intermediate_dtype],
        "T": KERNEL_TYPES[problem.dtype],
        "Activation": problem.activation,
        "TileM": _TILE_M,
        "Vector": vector,
    }
    return KernelSpec(load("activation_product"), tuple(values.items()))


class ActivationProduct:
    """The kernel bound to a problem: call it with the workspace, `out` and the stream."""

    def __init__(self, problem: Problem, device: DeviceInfo, intermediate: Intermediate) -> None:
        spec = activation_product_spec(problem, intermediate.dtype)
        vector = dict(spec.values)["Vector"]
        assert isinstance(vector, int)
        self._kernel = compile_kernel(spec, device)
        self._intermediate = intermediate
        columns = min(ceil_div(problem.n, 32 * vector), MAX_GRID_Y)
        self._launch = LaunchConfig((ceil_div(problem.m, _TILE_M), columns), _TILE_M * 32)
        self._sizes = (size(problem.m), size(problem.n), size(intermediate.leading_dimension))

    def __call__(self, workspace: int, out: Matrix, stream: Any) -> None:
        c2 = workspace + self._intermediate.matrix_bytes
        arguments = (pointer(workspace), pointer(c2), pointer(out.pointer), *self._sizes, size(out.row_stride))
        self._kernel(self._launch, arguments, stream)
