"""split_wgmma: the main loop of fused_wgmma over the tiles of both products, then the activation product."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig, pointer, size
from autodispatch.problem import Problem
from autodispatch.variants.activation_product import ActivationProduct, Intermediate, intermediate_dtypes
from autodispatch.variants.base import SPLIT, Call, Executable, Variant, Work
from autodispatch.variants.wgmma import (
    REQUIREMENTS,
    THREADS,
    WgmmaConfig,
    input_maps,
    restrictions,
)


@dataclass(frozen=True)
class SplitWgmmaConfig(WgmmaConfig):
    """Tunables of split_wgmma; `intermediate` is the type of c1 and c2."""

    intermediate: str

    def shared_bytes(self, layout: str) -> int:
        return self.num_stages * (self.stage_bytes(1, layout) + 16)


class SplitWgmma(Variant):
    name = "split_wgmma"
    path = SPLIT
    kind = "cuda"
    space = ConfigSpace(
        SplitWgmmaConfig,
        {
            "tile_m": (64, 128),
            "tile_n": (128, 192, 256),
            "num_stages": (5, 6, 7, 8),
            "group_m": (8, 16),
            "intermediate": ("float32", "bfloat16"),
        },
        (
            Restriction(
                lambda c, p, d: c.intermediate in intermediate_dtypes(p), 'math="fast" for bfloat16 intermediates'
            ),
            *restrictions(SplitWgmmaConfig.shared_bytes, 1),
        ),
    )
    requirements = REQUIREMENTS
    architecture_features = True
    sources = ("split_wgmma", "activation_product")

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        if problem.m <= 64:
            return SplitWgmmaConfig(64, 128, 8, 8, "float32")
        return SplitWgmmaConfig(128, 192, 5, 8, "float32")

    def work(self, config: SplitWgmmaConfig, problem: Problem) -> Work:
        return config.work(problem, 1, config.shared_bytes(problem.layout))

    def workspace_bytes(self, config: SplitWgmmaConfig, problem: Problem) -> int:
        return Intermediate(problem, config.intermediate).total_bytes

    def executable(self, config: SplitWgmmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        return _SplitWgmma(self.spec(config, problem), config, problem, device)


class _SplitWgmma(Executable):
    def __init__(self, spec: KernelSpec, config: SplitWgmmaConfig, problem: Problem, device: DeviceInfo) -> None:
        self._config = config
        self._layout = problem.layout
        self._intermediate = Intermediate(problem, config.intermediate)
        self._activation_product = ActivationProduct(problem, device, self._intermediate)
        self.shared_bytes = config.shared_bytes(problem.layout)
        blocks = min(2 * config.tiles(problem), device.sm_count)
        self._launch = LaunchConfig((blocks, 1), THREADS, self.shared_bytes)
        self._kernel = compile_kernel(spec, device, self.shared_bytes)
        self._sizes = tuple(size(x) for x in (problem.m, problem.n, problem.k, self._intermediate.leading_dimension))
        self.workspace_bytes = self._intermediate.total_bytes
        self.resources = self._kernel.resources

    def __call__(self, call: Call) -> None:
        inputs = input_maps(call.operands, self._config, self._layout)
        c1, c2 = call.workspace, call.workspace + self._intermediate.matrix_bytes
        self._kernel(self._launch, (*inputs, pointer(c1), pointer(c2), *self._sizes), call.stream)
        self._activation_product(call.workspace, call.operands.out, call.stream)
