"""Counters: what a dispatcher did so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """What happened.

    Attributes:
        calls: launches by the origin of what served them.
        misses: problems that were not tuned when they first came.
        compiles: kernels that were built, or taken from the cache on disk.
        tunings: problems that were tuned within calls or in the background.
        fallbacks: candidates passed over since they did not build, and calls served without scratch memory.
        copies: arguments that were copied since no kernel can read them as they lie.
    """

    misses: int = 0
    compiles: int = 0
    tunings: int = 0
    fallbacks: int = 0
    copies: int = 0
    calls: dict[str, int] = field(default_factory=dict)
