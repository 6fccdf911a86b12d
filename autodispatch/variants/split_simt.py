"""split_simt: both products on the fp32 units in one launch, then the activation product."""

from __future__ import annotations

from autodispatch.config import Config
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants import simt
from autodispatch.variants.activation_product import Intermediate
from autodispatch.variants.base import SPLIT, Executable, Variant, Work
from autodispatch.variants.executables import SplitExecutable


class SplitSimt(Variant):
    name = "split_simt"
    path = SPLIT
    kind = "cuda"
    space = simt.SPLIT_SPACE
    sources = ("split_simt", "activation_product")

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return simt.default(problem, 1)

    def work(self, config: simt.SimtConfig, problem: Problem) -> Work:
        return config.work(problem, 1)

    def workspace_bytes(self, config: simt.SimtConfig, problem: Problem) -> int:
        return Intermediate(problem, "float32").total_bytes

    def executable(self, config: simt.SimtConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((2 * config.tiles(problem), 1), config.threads)
        return SplitExecutable(self.spec(config, problem), launch, problem, device, Intermediate(problem, "float32"))
