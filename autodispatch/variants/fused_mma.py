"""fused_mma: both products of a tile by tensor cores, activation and product in registers, one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autodispatch.compiler import KernelSpec
from autodispatch.config import Config, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig, ceil_div, size
from autodispatch.problem import Operands, Problem
from autodispatch.variants.base import FUSED, Executable, Variant, Work
from autodispatch.variants.executables import FusedExecutable
from autodispatch.variants.mma import REQUIREMENTS, MmaConfig, config_space, starting_tile

_TAIL_M = (0, 32, 64)
_WITH_TAIL = ((64, 64), (128, 64))  # tile_m, tile_n
_MAX_ROUNDS = 8  # of whole tiles; beyond it a last one of few costs little
_TAIL_COST = {2: 0.35, 4: 0.2}  # of a round of whole tiles, by tile_m / tail_m


@dataclass(frozen=True)
class FusedMmaConfig(MmaConfig):
    """Tunables of fused_mma; with `tail_m` the last columns of tiles, beyond those that fill whole rounds of the SMs,
    are cut into tiles of that many rows and half the columns."""

    tail_m: int

    def whole_columns(self, problem: Problem, device: DeviceInfo) -> int:
        """How many columns of tiles are computed whole."""
        if not self.tail_m:
            return ceil_div(problem.n, self.tile_n)
        in_whole_rounds = self.tiles(problem) // device.sm_count * device.sm_count
        return in_whole_rounds // ceil_div(problem.m, self.tile_m)

    def tail_blocks(self, problem: Problem, device: DeviceInfo) -> int:
        """The blocks that compute small tiles."""
        if not self.tail_m:
            return 0
        columns = ceil_div(problem.n, self.tile_n // 2) - 2 * self.whole_columns(problem, device)
        return ceil_div(problem.m, self.tail_m) * max(0, columns)


def _shared_bytes(config: MmaConfig, problem: Problem) -> int:
    return config.shared_bytes(2, problem.item_bytes, problem.item_bytes)


def _has_tail_shape(config: FusedMmaConfig) -> bool:
    tile, warps = (config.tile_m, config.tile_n), (config.warps_m, config.warps_n)
    return not config.tail_m or (tile in _WITH_TAIL and warps == (2, 2) and config.tail_m < config.tile_m)


def _tail_fills_rounds(config: FusedMmaConfig, problem: Problem, device: DeviceInfo) -> bool:
    return not config.tail_m or (
        device.sm_count <= config.tiles(problem) <= _MAX_ROUNDS * device.sm_count
        and 0 < config.tail_blocks(problem, device) <= device.sm_count
    )


class FusedMma(Variant):
    name = "fused_mma"
    path = FUSED
    kind = "cuda"
    space = config_space(
        2,
        FusedMmaConfig,
        _shared_bytes,
        {"tail_m": _TAIL_M},
        Restriction(
            lambda c, p, d: _has_tail_shape(c), "a tail of tiles of 64 or 128 x (2 x 64) by two by two warps", True
        ),
        Restriction(
            lambda c, p, d: not c.tail_m or (p.item_bytes == 2 and d.compute_capability >= (8, 0) and c.tail_m < p.m),
            "a tail only for 16-bit elements, from 8.0, of fewer rows than m",
        ),
        Restriction(
            _tail_fills_rounds, "a tail of at most one small tile per SM, behind one to eight rounds of whole tiles"
        ),
    )
    requirements = REQUIREMENTS
    sources = ("fused_mma",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return FusedMmaConfig(**starting_tile(problem, 2, device), tail_m=0)

    def work(self, config: FusedMmaConfig, problem: Problem) -> Work:
        work = config.work(problem, 2, _shared_bytes(config, problem))
        return work._replace(tail=_TAIL_COST[config.tile_m // config.tail_m]) if config.tail_m else work

    def executable(self, config: FusedMmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        columns = config.whole_columns(problem, device)
        blocks = ceil_div(problem.m, config.tile_m) * columns + config.tail_blocks(problem, device)
        launch = LaunchConfig((blocks, 1), config.threads, _shared_bytes(config, problem))
        return FusedMmaExecutable(self.spec(config, problem), launch, problem, device, columns)


class FusedMmaExecutable(FusedExecutable):
    """A fused kernel that is told besides how many columns of tiles are whole."""

    def __init__(
        self, spec: KernelSpec, launch: LaunchConfig, problem: Problem, device: DeviceInfo, columns: int
    ) -> None:
        super().__init__(spec, launch, problem, device)
        self._columns = size(columns)

    def arguments(self, operands: Operands) -> tuple[Any, ...]:
        return (*super().arguments(operands), self._columns)
