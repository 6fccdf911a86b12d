"""How a kernel is launched: grid, block, dynamic shared memory, and arguments of declared width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from autodispatch.errors import UnsupportedProblemError

MAX_GRID_X = 2**31 - 1
MAX_GRID_Y = 65535


@dataclass(frozen=True)
class LaunchConfig:
    """Blocks on x and y, threads per block, bytes of dynamic shared memory.

    `programmatic`: the kernel itself waits for the grid before it in the stream (grid.cuh), so that its
    blocks may come up while that one ends: programmatic dependent launch, where device and driver have it.
    """

    grid: tuple[int, int]
    threads: int
    shared_bytes: int = 0
    programmatic: bool = False

    def __post_init__(self) -> None:
        x, y = self.grid
        if not (1 <= x <= MAX_GRID_X and 1 <= y <= MAX_GRID_Y):
            limits = f"1 to {MAX_GRID_X} by 1 to {MAX_GRID_Y}"
            raise UnsupportedProblemError(f"the grid must be {limits} blocks (got {x} by {y})")


def pointer(address: int) -> Any:
    """A device address as a kernel argument (`T*`)."""
    return np.uint64(address)


def size(value: int) -> Any:
    """A size or stride as a kernel argument (`long long`)."""
    return np.int64(value)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def round_up(x: int, multiple: int) -> int:
    return ceil_div(x, multiple) * multiple
