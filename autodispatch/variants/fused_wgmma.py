"""fused_wgmma: Hopper's ping-pong kernel, one wide wgmma over [gate tile | up tile], one launch."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import LaunchConfig
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Variant, Work
from autodispatch.variants.wgmma import (
    MAX_STAGES,
    REQUIREMENTS,
    THREADS,
    FusedWgmmaExecutable,
    WgmmaConfig,
    restrictions,
    with_most_stages,
)

_MAX_M_FOR_HINTS = 1024


@dataclass(frozen=True)
class FusedWgmmaConfig(WgmmaConfig):
    """Tunables of fused_wgmma; `l2_hints` 1 keeps a in L2 and streams the weights; `cooperative` 1 shares each tile
    between the two warpgroups instead of giving them whole tiles by turns; 2 does so where no block has more than one
    tile, whose store then needs no shared memory of its own."""

    l2_hints: int
    cooperative: int

    def shared_bytes(self, layout: str) -> int:
        store = 0 if self.cooperative == 2 else 2 * self.tile_n * 128
        return self.num_stages * (self.stage_bytes(2, layout) + 16) + store


def _default(problem: Problem, device: DeviceInfo) -> FusedWgmmaConfig:
    """The fewest rounds of tile columns over the SMs; of equal ones the widest tile."""
    tile_m = 64 if problem.m <= 64 else 128
    widths = (96, 72, 64) if problem.layout == "kn" else (96, 80, 72, 64)

    def cost(width: int) -> int:
        tiles = -(-problem.m // tile_m) * -(-problem.n // width)
        return -(-tiles // device.sm_count) * width

    tile_n = min(widths, key=cost)
    group_m = 16 if problem.layout == "nk" and tile_n != 64 and problem.m > 8 * tile_m else 8
    hints = 1 if problem.m <= 512 else 0
    config = FusedWgmmaConfig(tile_m, tile_n, MAX_STAGES, group_m, hints, 0)
    return with_most_stages(config, lambda c: c.shared_bytes(problem.layout), device.shared_bytes_per_block)


class FusedWgmma(Variant):
    name = "fused_wgmma"
    path = FUSED
    kind = "cuda"
    space = ConfigSpace(
        FusedWgmmaConfig,
        {
            "tile_m": (64, 128, 192, 256),
            "tile_n": (64, 72, 80, 96, 104, 112, 128),
            "num_stages": (3, 4, 5, 6, 7, 8),
            "group_m": (8, 16),
            "l2_hints": (0, 1),
            "cooperative": (0, 1, 2),
        },
        (
            Restriction(
                lambda c, p, d: p.layout == "nk" or c.tile_n != 104,
                "a tile width that wastes little of its boxes for kn",
            ),
            Restriction(
                lambda c, p, d: not c.l2_hints or p.m <= _MAX_M_FOR_HINTS, f"m of at most {_MAX_M_FOR_HINTS} for hints"
            ),
            Restriction(
                lambda c, p, d: c.tile_m in (128, 256) if c.cooperative else c.tile_m <= 192,
                "cooperative tiles of 128 or 256 rows, others of at most 192",
                is_fixed=True,
            ),
            Restriction(
                lambda c, p, d: c.cooperative != 1 or c.tile_m == 256 or c.tile_n > 96,
                "cooperative tiles of several per block over 128 x 96",
                is_fixed=True,
            ),
            Restriction(
                lambda c, p, d: c.cooperative != 2 or c.tiles(p) <= d.sm_count, "one tile per block for cooperative 2"
            ),
            Restriction(
                lambda c, p, d: not c.cooperative or p.m > c.tile_m // 2, "more rows than half a cooperative tile"
            ),
            *restrictions(FusedWgmmaConfig.shared_bytes, 2),
        ),
    )
    requirements = REQUIREMENTS
    architecture_features = True
    sources = ("fused_wgmma",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return _default(problem, device)

    def work(self, config: FusedWgmmaConfig, problem: Problem) -> Work:
        shared = config.shared_bytes(problem.layout)
        return config.work(problem, 2, shared, overlapped=not config.cooperative)

    def executable(self, config: FusedWgmmaConfig, problem: Problem, device: DeviceInfo) -> Executable:
        shared = config.shared_bytes(problem.layout)
        launch = LaunchConfig((min(config.tiles(problem), device.sm_count), 1), THREADS, shared)
        return FusedWgmmaExecutable(self.spec(config, problem), config, launch, problem, device)
