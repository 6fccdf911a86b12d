"""cpu_split and cpu_fused: the same two paths on NumPy, for machines without a GPU and for tests of the whole flow.

Both compute in float32 and round once to the type of `out`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autodispatch.activations import ACTIVATIONS
from autodispatch.config import Config, ConfigSpace
from autodispatch.device import DeviceInfo
from autodispatch.launch import ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, SPLIT, Call, Executable, Unit, Variant, Work


@dataclass(frozen=True)
class CpuSplitConfig(Config):
    """cpu_split has no tunables."""


@dataclass(frozen=True)
class CpuFusedConfig(Config):
    """Tunables of cpu_fused: the block of `out` whose products are activated while they are in cache."""

    tile_m: int
    tile_n: int


class CpuSplit(Variant):
    name = "cpu_split"
    path = SPLIT
    kind = "cpu"
    space = ConfigSpace(CpuSplitConfig, {})
    is_library = True

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return CpuSplitConfig()

    def work(self, config: CpuSplitConfig, problem: Problem) -> Work:
        return Work(Unit.CPU, 1, problem.m, problem.n, 2, 1, 0, 1)

    def executable(self, config: CpuSplitConfig, problem: Problem, device: DeviceInfo) -> Executable:
        return _CpuExecutable(problem, problem.m, problem.n)


class CpuFused(Variant):
    name = "cpu_fused"
    path = FUSED
    kind = "cpu"
    space = ConfigSpace(CpuFusedConfig, {"tile_m": (64, 256, 1024), "tile_n": (128, 512, 2048)})

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return CpuFusedConfig(256, 512)

    def work(self, config: CpuFusedConfig, problem: Problem) -> Work:
        blocks = ceil_div(problem.m, config.tile_m) * ceil_div(problem.n, config.tile_n)
        return Work(Unit.CPU, blocks, config.tile_m, config.tile_n, 2, 1, 0, 1)

    def executable(self, config: CpuFusedConfig, problem: Problem, device: DeviceInfo) -> Executable:
        return _CpuExecutable(problem, config.tile_m, config.tile_n)


class _CpuExecutable(Executable):
    """Walks `out` in blocks; the split path is the one with a single block."""

    def __init__(self, problem: Problem, tile_m: int, tile_n: int) -> None:
        self._tile_m, self._tile_n = max(1, tile_m), max(1, tile_n)
        self._layout = problem.layout
        self._activation = ACTIVATIONS[problem.activation]

    def __call__(self, call: Call) -> None:
        a, b1, b2, out = (x.array for x in call.operands)
        a, b1, b2 = (x if x.dtype == np.float32 else x.astype(np.float32) for x in (a, b1, b2))
        m, n = out.shape
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for i in range(0, m, self._tile_m):
                rows = a[i : i + self._tile_m]
                for j in range(0, n, self._tile_n):
                    columns = slice(j, j + self._tile_n)
                    gate = rows @ b1[:, columns]
                    gate = self._activation(gate)
                    gate *= rows @ b2[:, columns]
                    out[i : i + self._tile_m, columns] = gate
