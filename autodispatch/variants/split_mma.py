"""split_mma: both products by tensor cores in one launch, then the activation product."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import ITEM_BYTES, Problem
from autodispatch.variants.activation_product import Intermediate, intermediate_dtypes
from autodispatch.variants.base import SPLIT, Executable, Variant, Work
from autodispatch.variants.executables import SplitExecutable
from autodispatch.variants.mma import REQUIREMENTS, MmaConfig, config_space, starting_tile

_MAX_BLOCKS_PER_SM = 4  # with k shared out
_MIN_STEPS = 8  # of the main loop, in each share


@dataclass(frozen=True)
class SplitMmaConfig(MmaConfig):
    """Tunables of split_mma; `split_k` blocks share a tile's k, and `intermediate` is the type of c1 and c2."""

    split_k: int
    intermediate: str


def _shared_bytes(config: SplitMmaConfig, problem: Problem) -> int:
    return config.shared_bytes(1, problem.item_bytes, ITEM_BYTES[config.intermediate])


def _share_of_k_pays(config: SplitMmaConfig, problem: Problem, device: DeviceInfo) -> bool:
    blocks = 2 * config.tiles(problem) * config.split_k
    return config.split_k == 1 or (
        config.intermediate == "float32"
        and blocks <= _MAX_BLOCKS_PER_SM * device.sm_count
        and problem.k >= config.split_k * config.tile_k * _MIN_STEPS
    )


class SplitMma(Variant):
    name = "split_mma"
    path = SPLIT
    kind = "cuda"
    space = config_space(
        1,
        SplitMmaConfig,
        _shared_bytes,  # type: ignore[arg-type]
        {"split_k": (1, 2, 4, 8), "intermediate": ("float32", "bfloat16")},
        Restriction(lambda c, p, d: c.intermediate in intermediate_dtypes(p), 'math="fast" for bfloat16 intermediates'),
        Restriction(_share_of_k_pays, "shared k only for fp32 intermediates, few blocks, and 8 steps in each share"),
    )
    requirements = REQUIREMENTS
    sources = ("split_mma", "activation_product")

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return SplitMmaConfig(**starting_tile(problem, 1, device), split_k=1, intermediate="float32")

    def work(self, config: SplitMmaConfig, problem: Problem) -> Work:
        return config.work(problem, 1, _shared_bytes(config, problem), config.split_k)

    def workspace_bytes(self, config: SplitMmaConfig, problem: Problem) -> int:
        return Intermediate(problem, config.intermediate, config.split_k).total_bytes

    def executable(self, config: SplitMmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        grid = (2 * config.tiles(problem), config.split_k)
        launch = LaunchConfig(grid, config.threads, _shared_bytes(config, problem))
        intermediate = Intermediate(problem, config.intermediate, config.split_k)
        return SplitExecutable(self.spec(config, problem), launch, problem, device, intermediate)
