"""fused_simt: both products of a tile on the fp32 units; any stride, size and alignment."""

from __future__ import annotations

from autodispatch.config import Config
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants import simt
from autodispatch.variants.base import FUSED, Executable, Variant, Work
from autodispatch.variants.executables import FusedExecutable


class FusedSimt(Variant):
    name = "fused_simt"
    path = FUSED
    kind = "cuda"
    space = simt.FUSED_SPACE
    sources = ("fused_simt",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return simt.default(problem, 2)

    def work(self, config: simt.SimtConfig, problem: Problem) -> Work:
        return config.work(problem, 2)

    def executable(self, config: simt.SimtConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((config.tiles(problem), 1), config.threads)
        return FusedExecutable(self.spec(config, problem), launch, problem, device)
