"""What the mma.sync variants share: their tunables, restrictions, and kernel instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_X, ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import Unit, Work


@dataclass(frozen=True)
class MmaConfig(Config):
    """Tunables of the mma.sync kernels; a block has `num_warps` warps."""

    group_m: ClassVar[int] = 8  # tile rows walked together

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    num_warps: int

    @property
    def warps_m(self) -> int:
        return 1 if self.tile_m < 32 else 2

    @property
    def warps_n(self) -> int:
        return self.num_warps // self.warps_m

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    def shared_bytes(self, products: int) -> int:
        return self.num_stages * (self.tile_m + products * self.tile_n) * self.tile_k * 2

    def accumulators(self, products: int) -> int:
        return products * self.tile_m * self.tile_n // self.threads

    def tiles(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.tile_m) * ceil_div(problem.n, self.tile_n)

    def work(self, problem: Problem, products: int) -> Work:
        """The products of a kernel whose blocks compute `products` of them."""
        return Work(
            Unit.TENSOR,
            2 // products * self.tiles(problem),
            self.tile_m,
            self.tile_n,
            products,
            self.threads,
            self.shared_bytes(products),
            3 - products,
            ceil_div(problem.k, self.tile_k),
            (self.tile_k if problem.layout == "nk" else self.tile_n) * problem.item_bytes,
        )


def requirements() -> tuple[Restriction, ...]:
    return (
        Restriction(lambda c, p, d: p.dtype in ("float16", "bfloat16"), "float16 or bfloat16"),
        Restriction(
            lambda c, p, d: d.compute_capability >= ((8, 0) if p.dtype == "bfloat16" else (7, 5)),
            "compute capability 7.5 for float16, 8.0 for bfloat16",
        ),
        Restriction(lambda c, p, d: p.alignment >= 16, "pointers and row offsets that are multiples of 16 bytes"),
    )


def config_space(
    products: int, config_type: type[MmaConfig], axes: dict[str, tuple[object, ...]], *more: Restriction
) -> ConfigSpace:
    """The space of a kernel that computes `products` products per block."""

    def restriction(message: str) -> Callable[[Callable[[MmaConfig, Problem, DeviceInfo], bool]], Restriction]:
        return lambda holds: Restriction(holds, message)

    return ConfigSpace(
        config_type,
        {
            "tile_m": (16, 32, 64, 128),
            "tile_n": (32, 64, 128),
            "tile_k": (32, 64),
            "num_stages": (3, 4),
            "num_warps": (4, 8),
            **axes,
        },
        (
            restriction("tile_n a multiple of 16 per warp")(lambda c, p, d: c.tile_n % (16 * c.warps_n) == 0),
            restriction("tile_m a multiple of 16 per warp")(lambda c, p, d: c.tile_m % (16 * c.warps_m) == 0),
            restriction("3 stages of 64 or 4 of 32 in k")(
                lambda c, p, d: (c.tile_k, c.num_stages) in ((64, 3), (32, 4))
            ),
            restriction("8 warps for blocks of 16384 accumulators or more")(
                lambda c, p, d: c.num_warps == 4 or products * c.tile_m * c.tile_n >= 16384
            ),
            restriction("at most 128 accumulators per thread, 96 where a warp spans over 64 columns")(
                lambda c, p, d: c.accumulators(products) <= (128 if products * c.tile_n <= 64 * c.warps_n else 96)
            ),
            restriction("the device's shared memory per block")(
                lambda c, p, d: c.shared_bytes(products) <= d.shared_bytes_per_block
            ),
            restriction("a grid of fewer than 2^31 blocks")(lambda c, p, d: 2 * c.tiles(p) <= MAX_GRID_X),
            *more,
        ),
    )


def starting_tile(problem: Problem, widest: int) -> dict[str, int]:
    """The default's tunables: the tile's height follows m, its width is `widest` for tall tiles."""
    tile_m = next((t for t in (16, 32, 64) if problem.m <= t), 128)
    return {
        "tile_m": tile_m,
        "tile_n": widest if tile_m >= 64 else 64,
        "tile_k": 32,
        "num_stages": 4,
        "num_warps": 4,
    }
