"""The two forms of a CUDA candidate: one fused kernel, or products into a workspace and then the activation product."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo
from autodispatch.driver import PackedLaunch
from autodispatch.launch import LaunchConfig, pointer, size
from autodispatch.problem import Operands, Problem
from autodispatch.variants.activation_product import ActivationProduct, Intermediate
from autodispatch.variants.base import Call, Executable


class OneKernelExecutable(Executable):
    """One launch: subclasses say what its arguments are."""

    def __init__(self, spec: KernelSpec, launch: LaunchConfig, problem: Problem, device: DeviceInfo) -> None:
        # reads of 16 bytes never go through the read-only cache; measured on this architecture alone
        is_early = spec.source.waits and problem.alignment >= 16 and device.compute_capability == (9, 0)
        self._launch = replace(launch, programmatic=is_early)
        self._kernel = compile_kernel(spec, device, launch.shared_bytes)
        self._sizes = (size(problem.m), size(problem.n), size(problem.k))
        self.resources = self._kernel.resources
        self.shared_bytes = launch.shared_bytes + self.resources.shared_bytes

    @abstractmethod
    def arguments(self, operands: Operands) -> tuple[Any, ...]:
        """In the order of the kernel's parameters."""

    def __call__(self, call: Call) -> None:
        self._kernel(self._launch, self.arguments(call.operands), call.stream)

    def pack(self, call: Call) -> PackedLaunch:
        return self._kernel.pack(self._launch, self.arguments(call.operands), call.stream.ptr)


class FusedExecutable(OneKernelExecutable):
    """Any kernel with the signature (a, b1, b2, out, m, n, k, lda, ldb1, ldb2, ldout)."""

    def arguments(self, operands: Operands) -> tuple[Any, ...]:
        return (
            *(pointer(x.pointer) for x in operands),
            *self._sizes,
            *(size(x.row_stride) for x in operands),
        )


class SplitExecutable(Executable):
    """Any kernel with the signature (a, b1, b2, c1, c2, m, n, k, lda, ldb1, ldb2, ldc), then the activation product."""

    def __init__(
        self,
        spec: KernelSpec,
        launch: LaunchConfig,
        problem: Problem,
        device: DeviceInfo,
        intermediate: Intermediate,
    ) -> None:
        self._launch = launch
        self._kernel = compile_kernel(spec, device, launch.shared_bytes)
        self._intermediate = intermediate
        self._activation_product = ActivationProduct(problem, device, intermediate)
        self._sizes = (size(problem.m), size(problem.n), size(problem.k))
        self.workspace_bytes = intermediate.total_bytes
        self.resources = self._kernel.resources
        self.shared_bytes = launch.shared_bytes + self.resources.shared_bytes

    def __call__(self, call: Call) -> None:
        a, b1, b2, out = call.operands
        c1, c2 = call.workspace, call.workspace + self._intermediate.matrix_bytes
        pointers = (pointer(a.pointer), pointer(b1.pointer), pointer(b2.pointer), pointer(c1), pointer(c2))
        strides = (size(a.row_stride), size(b1.row_stride), size(b2.row_stride))
        ldc = size(self._intermediate.leading_dimension)
        self._kernel(self._launch, (*pointers, *self._sizes, *strides, ldc), call.stream)
        self._activation_product(call.workspace, out, call.stream)
