"""fused_mma: both products of a tile by tensor cores, activation and product in registers, one launch."""

from __future__ import annotations

from autodispatch.config import Config
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Variant, Work
from autodispatch.variants.executables import FusedExecutable
from autodispatch.variants.mma import MmaConfig, config_space, requirements, starting_tile


class FusedMma(Variant):
    name = "fused_mma"
    path = FUSED
    kind = "cuda"
    space = config_space(2, MmaConfig, {})
    requirements = requirements()
    sources = ("fused_mma",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return MmaConfig(**starting_tile(problem, 64))

    def work(self, config: MmaConfig, problem: Problem) -> Work:
        return config.work(problem, 2)

    def executable(self, config: MmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((config.tiles(problem), 1), config.threads, config.shared_bytes(2))
        return FusedExecutable(self.spec(config, problem), launch, problem, device)
