"""fused_wgmma_small: Hopper's kernel for few rows, several small blocks per SM, one tile each, one launch."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_X, LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Unit, Variant, Work
from autodispatch.variants.wgmma import (
    MAX_STAGES,
    REQUIREMENTS,
    FusedWgmmaExecutable,
    TileConfig,
    loaded_columns,
    most_stages,
    with_most_stages,
)

_MAX_M = 512
_RESERVED_BYTES = 1024  # of shared memory, per block, by the system


@dataclass(frozen=True)
class FusedWgmmaSmallConfig(TileConfig):
    """Tunables of fused_wgmma_small: `blocks_per_sm` share an SM's registers and shared memory."""

    blocks_per_sm: int

    @property
    def threads(self) -> int:
        return 2 * max(self.tile_m, 64)

    def shared_bytes(self, layout: str) -> int:
        return self.num_stages * (self.stage_bytes(2, layout) + 16)

    def shared_limit(self, device: DeviceInfo) -> int:
        return device.shared_bytes_per_sm // self.blocks_per_sm - _RESERVED_BYTES


def _suits(tile_m: int, m: int) -> bool:
    return (tile_m == 8 or m > tile_m // 2) and (tile_m >= 64 or m <= tile_m)


class FusedWgmmaSmall(Variant):
    name = "fused_wgmma_small"
    path = FUSED
    kind = "cuda"
    space = ConfigSpace(
        FusedWgmmaSmallConfig,
        {
            "tile_m": (8, 16, 32, 64, 128),
            "tile_n": (24, 32, 40, 48, 64, 72, 80, 96, 112, 128),
            "num_stages": (3, 4, 5, 6, 7, 8),
            "blocks_per_sm": (1, 2, 3, 4),
        },
        (
            Restriction(
                lambda c, p, d: _suits(c.tile_m, p.m),
                "the smallest tile that has all rows, or one of 64 or more that is over half full",
            ),
            Restriction(
                lambda c, p, d: loaded_columns(c.tile_n, p.layout) == c.tile_n, "a tile of whole boxes of columns"
            ),
            most_stages(FusedWgmmaSmallConfig.shared_bytes, 2, FusedWgmmaSmallConfig.shared_limit),
            Restriction(
                lambda c, p, d: c.tile_n + 32 <= min(255, d.registers_per_sm // (c.threads * c.blocks_per_sm)),
                "registers for one accumulator per column and 32 more in each thread",
            ),
            Restriction(lambda c, p, d: c.tiles(p) <= MAX_GRID_X, "fewer than 2^31 tiles"),
        ),
    )
    requirements = (*REQUIREMENTS, Restriction(lambda c, p, d: p.m <= _MAX_M, f"m of at most {_MAX_M}"))
    architecture_features = True
    sources = ("fused_wgmma_small",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        """32 columns by up to 64 rows, three blocks per SM: small enough to fill any GPU."""
        tile_m = next((t for t in (8, 16, 32) if problem.m <= t), 64)
        config = FusedWgmmaSmallConfig(tile_m, 32, MAX_STAGES, 3)
        return with_most_stages(config, lambda c: c.shared_bytes(problem.layout), config.shared_limit(device))

    def work(self, config: FusedWgmmaSmallConfig, problem: Problem) -> Work:
        shared = config.shared_bytes(problem.layout)
        return Work(
            Unit.WGMMA_SMALL,
            config.tiles(problem),
            config.tile_m,
            config.tile_n,
            2,
            config.threads,
            shared,
            1,
            loaded_n=loaded_columns(config.tile_n, problem.layout),
            stages=config.num_stages,
        )

    def executable(self, config: FusedWgmmaSmallConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((config.tiles(problem), 1), config.threads, config.shared_bytes(problem.layout))
        return FusedWgmmaExecutable(self.spec(config, problem), config, launch, problem, device)
