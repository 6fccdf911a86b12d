"""What the variants on the fp32 units share: their tunables and restrictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.launch import MAX_GRID_X, ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import Unit, Work


@dataclass(frozen=True)
class SimtConfig(Config):
    """Tunables of the simt kernels; a thread computes `thread_m` x `thread_n` outputs of each product."""

    group_m: ClassVar[int] = 8  # tile rows walked together

    tile_m: int
    tile_n: int
    tile_k: int
    thread_m: int
    thread_n: int

    @property
    def threads(self) -> int:
        return self.tile_m // self.thread_m * (self.tile_n // self.thread_n)

    def shared_bytes(self, products: int) -> int:
        return 2 * self.tile_k * (self.tile_m + 4 + products * (self.tile_n + 4)) * 4

    def tiles(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.tile_m) * ceil_div(problem.n, self.tile_n)

    def work(self, problem: Problem, products: int) -> Work:
        """The products of a kernel whose blocks compute `products` of them."""
        return Work(
            Unit.FP32,
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


# rows and columns of a tile, and of a thread's share; the columns of the two products together, where a block has both
_SHAPES = (
    (16, 64, 2, 4),
    (16, 128, 2, 8),
    (64, 64, 4, 4),
    (64, 128, 4, 8),
    (64, 128, 8, 8),
    (128, 128, 8, 8),
    (128, 256, 8, 16),
)
_STATIC_SHARED_BYTES = 48 << 10  # the most that any architecture lets a kernel declare


def _space(products: int) -> ConfigSpace:
    return ConfigSpace(
        SimtConfig,
        {
            "tile_m": (16, 64, 128),
            "tile_n": (32, 64, 128),
            "tile_k": (8, 16),
            "thread_m": (2, 4, 8),
            "thread_n": (2, 4, 8),
        },
        (
            Restriction(
                lambda c, p, d: (c.tile_m, products * c.tile_n, c.thread_m, products * c.thread_n) in _SHAPES,
                "a tile that its threads share evenly",
                is_fixed=True,
            ),
            Restriction(
                lambda c, p, d: c.shared_bytes(products) <= _STATIC_SHARED_BYTES, "48 KB of static shared memory"
            ),
            Restriction(lambda c, p, d: 2 * c.tiles(p) <= MAX_GRID_X, "a grid of fewer than 2^31 blocks"),
        ),
    )


FUSED_SPACE, SPLIT_SPACE = _space(2), _space(1)


def default(problem: Problem, products: int) -> SimtConfig:
    """Small tiles for few rows, else 64 rows by 64 columns of each product."""
    if problem.m <= 16:
        return SimtConfig(16, 64 // products, 16, 2, 4 // products)
    return SimtConfig(64, 64, 16, 4, 4)
