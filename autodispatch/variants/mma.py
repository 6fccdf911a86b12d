"""What the mma.sync variants share: their tunables, restrictions, and kernel instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo
from autodispatch.launch import MAX_GRID_X, ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import Unit, Work

# tile_m, columns of both products of a block together, warps_m, warps_n: warps of up to 64 x 80 or 32 x 96
_SHAPES = (
    (16, 64, 1, 4),
    (16, 128, 1, 4),
    (32, 64, 2, 2),
    (32, 128, 2, 2),
    (64, 64, 2, 2),
    (64, 96, 2, 2),
    (64, 128, 2, 2),
    (64, 144, 2, 2),
    (64, 160, 2, 2),
    (64, 192, 2, 2),
    (64, 256, 2, 4),
    (128, 64, 2, 2),
    (128, 96, 2, 2),
    (128, 128, 2, 2),
    (128, 128, 2, 4),
    (128, 144, 2, 2),
    (128, 160, 2, 2),
    (128, 192, 4, 2),
    (128, 256, 2, 4),
    (256, 128, 4, 2),
    (256, 160, 4, 2),
)
_RING = {64: (4,), 128: (3, 4)}  # stages, by the bytes of k in one
_DEEP_RING, _DEEP_RING_ROWS = 6, 64  # of 128 bytes, where a tile is small and the job is to read the weights
_BETWEEN, _MANY_ROUNDS_ROWS = (96, 144), 1024  # columns that fill the last round of blocks, where rounds are few
_TALL = 32  # tile rows, from where on walking 16 of them together can pay
_REGISTERS = 255
_OTHER_REGISTERS = 64  # beside accumulators and fragments


@dataclass(frozen=True)
class MmaConfig(Config):
    """Tunables of the mma.sync kernels: `warps_m` x `warps_n` warps share a tile, and `group_m` tile rows are walked
    together."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    warps_m: int
    warps_n: int
    group_m: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def shared_bytes(self, products: int, item_bytes: int, out_bytes: int) -> int:
        """The stages, or what reuses them: the tile on its way out, and what warps with one product each trade."""
        stages = self.num_stages * (self.tile_m + products * self.tile_n) * self.tile_k * item_bytes
        traded = 4 if self.is_apart(products) else 0
        return max(stages, self.tile_m * self.tile_n * (out_bytes + traded))

    def is_apart(self, products: int) -> bool:
        """Whether warps have one product each, since both would not give each of them whole fragments."""
        return products == 2 and self.warps_n % 2 == 0 and self.tile_n % (8 * self.warps_n) != 0

    def registers(self, products: int, problem: Problem, device: DeviceInfo) -> int:
        """What a thread holds, and what ptxas was seen to need: accumulators, a step's fragments of `a` (or two steps'
        few), two groups of the weights', the places of groups in (k, n) rows, and, where there is no asynchronous copy,
        twice a stage on its way."""
        accumulators = products * self.tile_m * self.tile_n // self.threads
        fragments = 4 * max(4, self.tile_m // self.warps_m // 16) + 8
        groups = ceil_div(products * self.tile_n // self.warps_n, 16) if problem.layout == "kn" else 0
        places = groups * (2 if problem.item_bytes == 2 else 6)
        staged = 0
        if device.compute_capability < (8, 0):
            staged = (self.tile_m + products * self.tile_n) * self.tile_k // self.threads
        other = _OTHER_REGISTERS + (24 if device.compute_capability >= (10, 0) else 0)
        return accumulators + fragments + places + staged + other

    def tiles(self, problem: Problem) -> int:
        return ceil_div(problem.m, self.tile_m) * ceil_div(problem.n, self.tile_n)

    def work(self, problem: Problem, products: int, shared_bytes: int, sharers: int = 1) -> Work:
        """The products of a kernel whose blocks compute `products` of them, over a share of k."""
        return Work(
            Unit.TENSOR,
            2 // products * self.tiles(problem) * sharers,
            self.tile_m,
            self.tile_n,
            products,
            self.threads,
            shared_bytes,
            3 - products,
            ceil_div(ceil_div(problem.k, sharers), self.tile_k),
            (self.tile_k if problem.layout == "nk" else self.tile_n) * problem.item_bytes,
            stages=self.num_stages,
            sharers=sharers,
            step_bytes=self.tile_k * problem.item_bytes,
            apart=self.is_apart(products),
        )


def _needs(problem: Problem) -> tuple[int, int]:
    return (7, 5) if problem.dtype == "float16" else (8, 0)


REQUIREMENTS = (
    Restriction(
        lambda c, p, d: p.dtype != "float32" or p.precision == "tf32",
        'float16 or bfloat16, or float32 with precision="tf32"',
    ),
    Restriction(
        lambda c, p, d: d.compute_capability >= _needs(p), "compute capability 7.5 for float16, 8.0 for the others"
    ),
    Restriction(lambda c, p, d: p.alignment >= 16, "pointers and row offsets that are multiples of 16 bytes"),
)


def _ring_suits(config: MmaConfig, k_bytes: int, device: DeviceInfo) -> bool:
    if device.compute_capability < (8, 0):
        return (config.num_stages, config.tile_k) == (2, 32)
    deep = config.num_stages == _DEEP_RING and k_bytes == 128 and config.tile_m <= _DEEP_RING_ROWS
    return deep or config.num_stages in _RING.get(k_bytes, ())


def config_space(
    products: int,
    config_type: type[MmaConfig],
    shared_bytes: Callable[[MmaConfig, Problem], int],
    axes: dict[str, tuple[object, ...]],
    *more: Restriction,
) -> ConfigSpace:
    """The space of a kernel that computes `products` products per block."""

    def restriction(
        message: str, *, is_fixed: bool = False
    ) -> Callable[[Callable[[MmaConfig, Problem, DeviceInfo], bool]], Restriction]:
        return lambda holds: Restriction(holds, message, is_fixed)

    return ConfigSpace(
        config_type,
        {
            "tile_m": (16, 32, 64, 128, 256),
            "tile_n": (32, 48, 64, 72, 80, 96, 128, 192, 256),
            "tile_k": (16, 32, 64),
            "num_stages": (2, 3, 4, 6),
            "warps_m": (1, 2, 4),
            "warps_n": (2, 4),
            "group_m": (8, 16),
            **axes,
        },
        (
            restriction("a tile that its warps share in whole fragments", is_fixed=True)(
                lambda c, p, d: (c.tile_m, products * c.tile_n, c.warps_m, c.warps_n) in _SHAPES
            ),
            restriction("4 stages of 64 bytes of k, 3 or 4 of 128, 6 in small tiles; before 8.0 two of 64")(
                lambda c, p, d: _ring_suits(c, c.tile_k * p.item_bytes, d)
            ),
            restriction("before 8.0 a power of two of columns")(
                lambda c, p, d: d.compute_capability >= (8, 0) or c.tile_n & (c.tile_n - 1) == 0
            ),
            restriction("the registers of a thread")(
                lambda c, p, d: c.registers(products, p, d) <= _REGISTERS - (16 if c.tile_k * p.item_bytes > 64 else 0)
            ),
            restriction("the device's shared memory per block")(
                lambda c, p, d: shared_bytes(c, p) <= d.shared_bytes_per_block
            ),
            restriction("groups of 8 tile rows, or of 16 where there are more than 32 of 128 and more")(
                lambda c, p, d: c.group_m == 8 or (c.tile_m >= 128 and ceil_div(p.m, c.tile_m) > _TALL)
            ),
            restriction("tiles of 96 and 144 columns of both products for fewer than 1024 rows")(
                lambda c, p, d: p.m < _MANY_ROUNDS_ROWS or products * c.tile_n not in _BETWEEN
            ),
            restriction("tiles of up to 64 rows for up to 64")(lambda c, p, d: c.tile_m <= 64 or p.m > 64),
            restriction("a grid of fewer than 2^31 blocks")(lambda c, p, d: 2 * c.tiles(p) <= MAX_GRID_X),
            *more,
        ),
    )


def starting_tile(problem: Problem, products: int, device: DeviceInfo) -> dict[str, int]:
    """The default's tunables: a tile as tall as m asks for, up to 128, and 128 columns of both products together."""
    tile_m = next((t for t in (16, 32, 64) if problem.m <= t), 128)
    modern = device.compute_capability >= (8, 0)
    return {
        "tile_m": tile_m,
        "tile_n": 128 // products,
        "tile_k": 64 // problem.item_bytes,
        "num_stages": 4 if modern else 2,
        "warps_m": 1 if tile_m == 16 else 2,
        "warps_n": 4 if tile_m == 16 or (tile_m == 128 and not modern) else 2,
        "group_m": 8,
    }
