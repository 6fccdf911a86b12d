"""fused_gemv: one or a few rows on the fp32 units, the weights streamed once through registers, one launch."""

from __future__ import annotations

from dataclasses import dataclass

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_X, LaunchConfig, ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Executable, Unit, Variant, Work
from autodispatch.variants.executables import FusedExecutable

_LANES_N = 16  # that stand side by side in a kn kernel
_MAX_STATIC_SHARED = 48 << 10


@dataclass(frozen=True)
class FusedGemvConfig(Config):
    """Tunables of fused_gemv: warps of a block, and vectors of 16 bytes that a lane has under way from each weight."""

    tile_m: int
    warps: int
    unroll: int

    @property
    def lanes_k(self) -> int:
        """Of a block, for kn: that share k."""
        return self.warps * 32 // _LANES_N

    def columns(self, problem: Problem) -> int:
        """Of one block."""
        return self.warps if problem.layout == "nk" else _LANES_N * 16 // problem.item_bytes

    def blocks(self, problem: Problem) -> int:
        return ceil_div(problem.n, self.columns(problem))

    def steps(self, problem: Problem) -> int:
        """How often a warp waits: for `unroll` vectors per lane, and for single ones at the end of k."""
        if problem.layout == "kn":
            return ceil_div(problem.k, self.lanes_k * self.unroll) + problem.k % self.unroll
        depth = 32 * 16 // problem.item_bytes  # of one vector per lane
        whole, rest = divmod(problem.k, self.unroll * depth)
        return whole + ceil_div(rest, depth)

    def registers(self, problem: Problem) -> int:
        """Of a thread, about: as ptxas takes them for bfloat16 on compute capability 9.0."""
        rows = 16 * (self.tile_m + 1) if problem.layout == "nk" else 20 * self.tile_m + 24
        return rows + 8 * self.unroll

    def shared_bytes(self, problem: Problem) -> int:
        return 0 if problem.layout == "nk" else self.lanes_k * 2 * self.tile_m * self.columns(problem) * 4


class FusedGemv(Variant):
    name = "fused_gemv"
    path = FUSED
    kind = "cuda"
    space = ConfigSpace(
        FusedGemvConfig,
        {"tile_m": (1, 2), "warps": (4, 8, 16), "unroll": (2, 3, 4, 8)},
        (
            Restriction(lambda c, p, d: c.tile_m == max(p.m, 1), "a tile of all rows"),
            Restriction(
                lambda c, p, d: c.shared_bytes(p) <= _MAX_STATIC_SHARED, "48 KiB of static shared memory for kn"
            ),
            Restriction(
                lambda c, p, d: c.tile_m * c.unroll * c.warps < 256,
                "few enough rows and vectors for the registers",
                is_fixed=True,
            ),
            Restriction(lambda c, p, d: c.blocks(p) <= MAX_GRID_X, "a grid of fewer than 2^31 blocks"),
        ),
    )
    requirements = (
        Restriction(lambda c, p, d: p.m <= 2, "m of at most 2"),
        Restriction(
            lambda c, p, d: p.dtype != "bfloat16" or d.compute_capability >= (8, 0),
            "compute capability 8.0 for bfloat16",
        ),
    )
    sources = ("fused_gemv",)

    def default(self, problem: Problem, device: DeviceInfo) -> Config:
        return FusedGemvConfig(max(problem.m, 1), 4 if problem.layout == "nk" else 8, 3)

    def work(self, config: FusedGemvConfig, problem: Problem) -> Work:
        return Work(
            Unit.GEMV,
            config.blocks(problem),
            config.tile_m,
            config.columns(problem),
            2,
            32 * config.warps,
            config.shared_bytes(problem),
            1,
            config.steps(problem),
            registers=config.registers(problem),
        )

    def executable(self, config: FusedGemvConfig, problem: Problem, device: DeviceInfo) -> Executable:
        launch = LaunchConfig((config.blocks(problem), 1), 32 * config.warps, 0)
        return FusedExecutable(self.spec(config, problem), launch, problem, device)
