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
            self.tile_k * (self.tile_m + products * self.tile_n) * 4,
            3 - products,
            ceil_div(problem.k, self.tile_k),
            (self.tile_k if problem.layout == "nk" else self.tile_n) * problem.item_bytes,
        )


SPACE = ConfigSpace(
    SimtConfig,
    {"tile_m": (16, 64, 128), "tile_n": (32, 64, 128), "tile_k": (16,), "thread_m": (2, 4, 8), "thread_n": (2, 4, 8)},
    (
        Restriction(
            lambda c, p, d: (
                (c.tile_m, c.tile_n, c.thread_m, c.thread_n)
                in ((16, 32, 2, 2), (16, 64, 2, 4), (64, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 8))
            ),
            "a tile that its threads share evenly",
        ),
        Restriction(lambda c, p, d: 2 * c.tiles(p) <= MAX_GRID_X, "a grid of fewer than 2^31 blocks"),
    ),
)


def default(problem: Problem) -> SimtConfig:
    """Small tiles for few rows, else 64 x 64."""
    if problem.m <= 16:
        return SimtConfig(16, 32, 16, 2, 2)
    return SimtConfig(64, 64, 16, 4, 4)
