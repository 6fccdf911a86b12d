"""What the Hopper variants share: their tunables, restrictions, and the tensor maps of a and the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autodispatch.config import Config, Restriction
from autodispatch.launch import MAX_GRID_X, ceil_div, round_up
from autodispatch.problem import Matrix, Problem
from autodispatch.tensor_map import tensor_map
from autodispatch.variants.base import Unit, Work

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

    def stage_bytes(self, products: int, layout: str) -> int:
        return (self.tile_m + products * loaded_columns(self.tile_n, layout)) * _TILE_K * 2

    def tiles(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.tile_m) * ceil_div(problem.n, self.tile_n)

    def work(self, problem: Problem, products: int, shared_bytes: int, *, overlapped: bool = True) -> Work:
        """The products of a kernel whose tiles hold `products` of them."""
        blocks = 2 // products * self.tiles(problem)
        unit = Unit.WGMMA if overlapped else Unit.WGMMA_COOPERATIVE
        return Work(unit, blocks, self.tile_m, self.tile_n, products, THREADS, shared_bytes, 3 - products)


REQUIREMENTS = (
    Restriction(lambda c, p, d: p.dtype in ("float16", "bfloat16"), "float16 or bfloat16"),
    Restriction(lambda c, p, d: d.compute_capability == (9, 0), "compute capability 9.0"),
    Restriction(lambda c, p, d: d.nvrtc_version >= (12, 9), "NVRTC 12.9 or newer"),
    Restriction(lambda c, p, d: p.alignment >= 16, "pointers and row offsets that are multiples of 16 bytes"),
    # the copy engine clips rows of a matrix in units of 16 bytes
    Restriction(lambda c, p, d: p.n % 8 == 0 and p.k % 8 == 0, "n and k that are multiples of 8"),
)


def restrictions(shared_bytes: Callable[[Any, str], int], products: int) -> tuple[Restriction, ...]:
    """Those of a kernel that needs `shared_bytes(config, layout)` bytes and holds `products` products in a tile."""

    def fits(config: Any, layout: str, limit: int) -> bool:
        nbytes = shared_bytes(config, layout)
        one_more = nbytes + int(config.stage_bytes(products, layout)) + 16
        return bool(nbytes <= limit and (config.num_stages == MAX_STAGES or one_more > limit))

    return (
        Restriction(
            lambda c, p, d: fits(c, p.layout, d.shared_bytes_per_block),
            "as many stages as fit into shared memory, at most 8",
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
    """Columns of one box of a (k, n) weight: 128 bytes unless 64 bytes waste less."""
    return 64 if round_up(tile_n, 64) == round_up(tile_n, 32) else 32


def loaded_columns(tile_n: int, layout: str) -> int:
    """Columns that a tile loads: those of whole boxes."""
    return tile_n if layout == "nk" else round_up(tile_n, atom_columns(tile_n))


def activations_map(a: Matrix, tile_m: int) -> Any:
    return tensor_map(a.pointer, a.rows, a.columns, a.row_stride, a.dtype, tile_m, _TILE_K, 128)


def weight_map(b: Matrix, layout: str, tile_n: int) -> Any:
    """The map of a weight in storage orientation: a tile's rows of (n, k), or one atom of (k, n)."""
    if layout == "nk":
        return tensor_map(b.pointer, b.rows, b.columns, b.row_stride, b.dtype, tile_n, _TILE_K, 128)
    columns = atom_columns(tile_n)
    return tensor_map(b.pointer, b.rows, b.columns, b.row_stride, b.dtype, _TILE_K, columns, 2 * columns)
