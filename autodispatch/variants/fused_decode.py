"""fused_decode: few rows, the weights streamed through rings in shared memory, tensor cores by mma.sync, one launch."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_X, LaunchConfig, ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Unit, Variant, Work
from autodispatch.variants.executables import FusedExecutable

_TILE_K = 64
_MAX_M = 512


@dataclass(frozen=True)
class FusedDecodeConfig(Config):
    """Tunables of fused_decode: `groups_k` groups of warps of a block, and `cluster_k` blocks, share k; each group has
    `num_stages` stages of its own."""

    tile_m: int
    tile_n: int
    groups_k: int
    num_stages: int
    cluster_k: int

    @property
    def column_warps(self) -> int:
        """Of one group: 16 columns each, or 8 where that does not divide the tile."""
        return self.tile_n // (8 if self.tile_n % 16 else 16)

    @property
    def warps(self) -> int:
        return self.column_warps * self.groups_k

    @property
    def shared_bytes(self) -> int:
        ring = self.groups_k * self.num_stages * (2 * self.tile_n + self.tile_m) * _TILE_K * 2
        sent = self.tile_m * self.tile_n * 8 + 128 if self.cluster_k > 1 else 0
        return ring + sent

    def grid(self, problem: Problem) -> tuple[int, int]:
        return ceil_div(problem.n, self.tile_n) * self.cluster_k, ceil_div(problem.m, self.tile_m)

    def blocks(self, problem: Problem) -> int:
        x, y = self.grid(problem)
        return x * y


def _cluster_suits(config: FusedDecodeConfig, problem: Problem, device: DeviceInfo) -> bool:
    """Four and more SMs must belong to one part of the GPU, which cannot be filled to the last SM: of 64 blocks for 132
    SMs clusters of 4 and 8 run at once, of 128 they were seen to wait for one another."""
    if config.cluster_k == 1:
        return True
    blocks = config.blocks(problem) if config.cluster_k == 2 else 3 * config.blocks(problem) // 2
    return problem.layout == "kn" and device.compute_capability >= (9, 0) and blocks <= device.sm_count


class FusedDecode(Variant):
    name = "fused_decode"
    path = FUSED
    kind = "cuda"
    space = ConfigSpace(
        FusedDecodeConfig,
        {
            "tile_m": (8, 16, 32, 64),
            "tile_n": (8, 16, 24, 32, 64),
            "groups_k": (1, 2, 4, 8),
            "num_stages": (3, 4, 6),
            "cluster_k": (1, 2, 4, 8),
        },
        (
            Restriction(lambda c, p, d: c.tile_m < 2 * max(p.m, 5), "a tile of less than twice the rows"),
            Restriction(
                lambda c, p, d: c.tile_m == 64 or p.m <= c.tile_m or p.n <= c.tile_n * d.sm_count,
                "a tile of all rows, up to 64, unless n alone makes fewer blocks than there are SMs",
            ),
            Restriction(lambda c, p, d: 4 <= c.warps <= 8, "4 to 8 warps", is_fixed=True),
            Restriction(
                lambda c, p, d: p.layout == "nk" or c.tile_n in (16, 32, 64),
                "a tile width that is a power of two of 16 or more for kn",
            ),
            Restriction(
                lambda c, p, d: c.shared_bytes <= d.shared_bytes_per_block, "the device's shared memory per block"
            ),
            Restriction(_cluster_suits, "clusters for kn, on compute capability 9.0, whose blocks all find SMs"),
            Restriction(lambda c, p, d: c.blocks(p) <= MAX_GRID_X, "a grid of fewer than 2^31 blocks"),
        ),
    )
    requirements = (
        Restriction(lambda c, p, d: p.dtype in ("float16", "bfloat16"), "float16 or bfloat16"),
        Restriction(lambda c, p, d: d.compute_capability >= (8, 0), "compute capability 8.0"),
        Restriction(lambda c, p, d: p.m <= _MAX_M, f"m of at most {_MAX_M}"),
    )
    sources = ("fused_decode",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        tile_m = next((t for t in (8, 16, 32) if problem.m <= t), 64)
        return FusedDecodeConfig(tile_m, 32, 2, 3, 1)

    def work(self, config: FusedDecodeConfig, problem: Problem) -> Work:
        return Work(
            Unit.DECODE,
            config.blocks(problem),
            config.tile_m,
            config.tile_n,
            2,
            32 * config.warps,
            config.shared_bytes,
            1,
            ceil_div(ceil_div(problem.k, _TILE_K), config.groups_k * config.cluster_k) + 3 * (config.cluster_k - 1),
            (_TILE_K if problem.layout == "nk" else config.tile_n) * problem.item_bytes,
            stages=config.num_stages,
            sharers=config.cluster_k,
        )

    def executable(self, config: FusedDecodeConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig(config.grid(problem), 32 * config.warps, config.shared_bytes)
        return FusedExecutable(self.spec(config, problem), launch, problem, device)
