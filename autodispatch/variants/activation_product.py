"""The second step of every split variant: out = activation(c1) * c2 by kernels/activation_product.cu."""

from __future__ import annotations

from typing import Any

from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_Y, LaunchConfig, ceil_div, pointer, round_up, size
from autodispatch.problem import ITEM_BYTES, Matrix, Problem
from autodispatch.source import load
from autodispatch.variants.base import KERNEL_TYPES, activation_type

_THREADS, _OUT_BYTES = 128, 16  # of a thread, as in the kernel


def intermediate_dtypes(problem: Problem) -> tuple[str, ...]:
    """In which types c1 and c2 may be kept: fp32, and bf16 where the caller allows a second rounding of bf16 data."""
    fast = problem.math == "fast" and problem.dtype == "bfloat16"
    return ("float32", "bfloat16") if fast else ("float32",)


class Intermediate:
    """c1 and c2, one after the other in the workspace, with rows padded to 8 elements; `partials` times, where k is
    shared out."""

    def __init__(self, problem: Problem, dtype: str, partials: int = 1) -> None:
        self.dtype = dtype
        self.partials = partials
        self.leading_dimension = round_up(problem.n, 8)
        self.matrix_bytes = problem.m * self.leading_dimension * ITEM_BYTES[dtype]
        self.total_bytes = 2 * partials * self.matrix_bytes


def activation_product_spec(problem: Problem, intermediate_dtype: str, partials: int = 1) -> KernelSpec:
    """The kernel instance; it stores vectors as wide as the problem's alignment lets `out` be written."""
    values = {
        "C": KERNEL_TYPES[intermediate_dtype],
        "T": KERNEL_TYPES[problem.dtype],
        "Activation": activation_type(problem),
        "NumPartials": partials,
        "Alignment": problem.alignment,
    }
    return KernelSpec(load("activation_product"), tuple(values.items()))


class ActivationProduct:
    """The kernel bound to a problem: call it with the workspace, `out` and the stream."""

    def __init__(self, problem: Problem, device: DeviceInfo, intermediate: Intermediate) -> None:
        self._kernel = compile_kernel(
            activation_product_spec(problem, intermediate.dtype, intermediate.partials), device
        )
        self._intermediate = intermediate
        rows = min(problem.m, MAX_GRID_Y)
        columns = _THREADS * _OUT_BYTES // problem.item_bytes
        self._launch = LaunchConfig((ceil_div(problem.n, columns), rows), _THREADS)
        self._sizes = (size(problem.m), size(problem.n), size(intermediate.leading_dimension))

    def __call__(self, workspace: int, out: Matrix, stream: Any) -> None:
        c2 = workspace + self._intermediate.matrix_bytes
        arguments = (pointer(workspace), pointer(c2), pointer(out.pointer), *self._sizes, size(out.row_stride))
        self._kernel(self._launch, arguments, stream)
