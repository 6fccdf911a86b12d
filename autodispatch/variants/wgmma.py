"""What the Hopper variants share: their tunables, restrictions, and the tensor maps of a and the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autodispatch.config import Config, Restriction
from autodispatch.launch import MAX_GRID_X, ceil_div
from autodispatch.problem import Matrix, Problem
from autodispatch.tensor_map import tensor_map
from autodispatch.variants.base import KERNEL_TYPES, Unit, Work

THREADS = 384
_TILE_K = 64
MAX_STAGES = 8


@dataclass(frozen=True)
class WgmmaConfig(Config):
    """Tunables of the Hopper kernels; `group_m` tile rows are walked together."""

    tile_m: int
    tile_n: int
    num_stages: int
    group_m: int

    def stage_bytes(self, products: int) -> int:
        return (self.tile_m + products * self.tile_n) * _TILE_K * 2

    def tiles(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.tile_m) * ceil_div(problem.n, self.tile_n)

    def work(self, problem: Problem, products: int, shared_bytes: int) -> Work:
        """The products of a kernel whose tiles hold `products` of them."""
        blocks = 2 // products * self.tiles(problem)
        return Work(Unit.WGMMA, blocks, self.tile_m, self.tile_n, products, THREADS, shared_bytes, 3 - products)

    def template_values(self, problem: Problem) -> dict[str, object]:
        return {
            "T": KERNEL_TYPES[problem.dtype],
            "Layout": problem.layout,
            "TileM": self.tile_m,
            "TileN": self.tile_n,
            "NumStages": self.num_stages,
            "GroupM": self.group_m,
        }


REQUIREMENTS = (
    Restriction(lambda c, p, d: p.dtype in ("float16", "bfloat16"), "float16 or bfloat16"),
    Restriction(lambda c, p, d: d.compute_capability == (9, 0), "compute capability 9.0"),
    Restriction(lambda c, p, d: d.nvrtc_version >= (12, 9), "NVRTC 12.9 or newer"),
    Restriction(lambda c, p, d: p.alignment >= 16, "pointers and row offsets that are multiples of 16 bytes"),
    # the copy engine clips rows of a matrix in units of 16 bytes
    Restriction(lambda c, p, d: p.n % 8 == 0 and p.k % 8 == 0, "n and k that are multiples of 8"),
)


def restrictions(shared_bytes: Callable[[Any], int], products: int) -> tuple[Restriction, ...]:
    """Those of a kernel that needs `shared_bytes(config)` of shared memory and holds `products` products in a tile."""

    def fits(config: Any, limit: int) -> bool:
        if shared_bytes(config) > limit:
            return False
        one_more = shared_bytes(config) + int(config.stage_bytes(products)) + 16
        return bool(config.num_stages == MAX_STAGES or one_more > limit)

    return (
        Restriction(
            lambda c, p, d: fits(c, d.shared_bytes_per_block), "as many stages as fit into shared memory, at most 8"
        ),
        Restriction(
            lambda c, p, d: c.tile_m // 64 * c.tile_n * products // 2 // (1 + getattr(c, "cooperative", 0)) <= 192,
            "at most 192 accumulators per thread",
        ),
        Restriction(
            lambda c, p, d: c.group_m == 8 or p.m > 8 * c.tile_m, "16 tile rows together where there are more than 8"
        ),
        Restriction(lambda c, p, d: 2 * c.tiles(p) <= MAX_GRID_X, "fewer than 2^31 tiles"),
    )


def atom_columns(tile_n: int) -> int:
    """Columns of one box of a (k, n) weight: 128 bytes if the tile divides into such boxes, else 64."""
    return 64 if tile_n % 64 == 0 else 32


def activations_map(a: Matrix, tile_m: int) -> Any:
    return tensor_map(a.pointer, a.rows, a.columns, a.row_stride, a.dtype, tile_m, _TILE_K, 128)


def weight_map(b: Matrix, layout: str, tile_n: int) -> Any:
    """The map of a weight in storage orientation: a tile's rows of (n, k), or one atom of (k, n)."""
    if layout == "nk":
        return tensor_map(b.pointer, b.rows, b.columns, b.row_stride, b.dtype, tile_n, _TILE_K, 128)
    columns = atom_columns(tile_n)
    return tensor_map(b.pointer, b.rows, b.columns, b.row_stride, b.dtype, _TILE_K, columns, 2 * columns)
