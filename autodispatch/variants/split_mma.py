"""split_mma: both products by tensor cores in one launch, then the activation product."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants.activation_product import Intermediate, intermediate_dtypes
from autodispatch.variants.base import SPLIT, Executable, Variant, Work
from autodispatch.variants.executables import SplitExecutable
from autodispatch.variants.mma import MmaConfig, config_space, requirements, starting_tile


@dataclass(frozen=True)
class SplitMmaConfig(MmaConfig):
    """Tunables of split_mma; `intermediate` is the type of c1 and c2."""

    intermediate: str


class SplitMma(Variant):
    name = "split_mma"
    path = SPLIT
    kind = "cuda"
    space = config_space(
        1,
        SplitMmaConfig,
        {"intermediate": ("float32", "bfloat16")},
        Restriction(lambda c, p, d: c.intermediate in intermediate_dtypes(p), 'math="fast" for bfloat16 intermediates'),
    )
    requirements = requirements()
    sources = ("split_mma", "activation_product")

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return SplitMmaConfig(**starting_tile(problem, 128), intermediate="float32")

    def work(self, config: SplitMmaConfig, problem: Problem) -> Work:
        return config.work(problem, 1)

    def workspace_bytes(self, config: SplitMmaConfig, problem: Problem) -> int:
        return Intermediate(problem, config.intermediate).total_bytes

    def executable(self, config: SplitMmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((2 * config.tiles(problem), 1), config.threads, config.shared_bytes(1))
        intermediate = Intermediate(problem, config.intermediate)
        return SplitExecutable(self.spec(config, problem), launch, problem, device, intermediate)
