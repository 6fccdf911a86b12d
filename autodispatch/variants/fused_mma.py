"""fused_mma: both products of a tile by tensor cores, activation and product in registers, one launch."""

from __future__ import annotations

from autodispatch.config import Config
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Variant, Work
from autodispatch.variants.executables import FusedExecutable
from autodispatch.variants.mma import REQUIREMENTS, MmaConfig, config_space, starting_tile


def _shared_bytes(config: MmaConfig, problem: Problem) -> int:
    return config.shared_bytes(2, problem.item_bytes, problem.item_bytes)


class FusedMma(Variant):
    name = "fused_mma"
    path = FUSED
    kind = "cuda"
    space = config_space(2, MmaConfig, _shared_bytes, {})
    requirements = REQUIREMENTS
    sources = ("fused_mma",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return MmaConfig(**starting_tile(problem, 2, device))

    def work(self, config: MmaConfig, problem: Problem) -> Work:
        return config.work(problem, 2, _shared_bytes(config, problem))

    def executable(self, config: MmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((config.tiles(problem), 1), config.threads, _shared_bytes(config, problem))
        return FusedExecutable(self.spec(config, problem), launch, problem, device)
