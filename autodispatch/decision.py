"""What the finals say: who leads, who cannot be told from the leader, and whom to pick, so that two tunings agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autodispatch.benchmark import FINAL_MARGIN, MAX_FINALISTS, MIN_FINALISTS, Timing
from autodispatch.variants import Candidate

TIE = 0.01  # a difference that is none, however sure
WORTH_LEAVING = 0.02  # a gain for which the default is left
STEADY = 0.25  # by how much a candidate may slow down, or speed up, over the finals
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Finalist:
    """A candidate's samples, one of each round, and what decides among equals. `name` is unique."""

    name: tuple[str, str]
    samples: tuple[float, ...]
    relative_error: float = 0.0
    workspace_bytes: int = 0
    is_incumbent: bool = False
    is_default: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Gain:
    """How much longer one candidate takes than another: the median over the rounds of the logarithm of the ratio, and a
    95 % interval for it. Both ran in every round, so that drift and throttling cancel."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """The pick, and all that are tied with the fastest, fastest first."""

    pick: Finalist
    ties: tuple[Finalist, ...]
    reason: str


def decide(finalists: Sequence[Finalist]) -> Verdict:
    """Picks by a fixed rule. Tied with the fastest is whose interval of the gain holds 0 or whose gain is below 1 %.

    The incumbent stays unless the fastest gains over 2 %; without one, so does the default. Else, among the tied, the
    smaller error (to two digits), less workspace, then the name decide: nothing that depends on the clock.
    """
    fastest = min(finalists, key=lambda f: (f.median, f.name))
    ties = tuple(sorted((f for f in finalists if _tied(f, fastest)), key=lambda f: (f.median, f.name)))
    incumbent = next((f for f in finalists if f.is_incumbent), None)
    default = next((f for f in finalists if f.is_default), None)
    for place, holder in (("decided before", incumbent), ("the default", default)):
        if holder is not None and gain(holder, fastest).median <= WORTH_LEAVING:
            return Verdict(holder, ties, f"{place}, and none is over {WORTH_LEAVING:.0%} faster")
    pick = min(ties, key=lambda f: (float(f"{f.relative_error:.1e}"), f.workspace_bytes, f.name))
    return Verdict(pick, ties, "the fastest" if len(ties) == 1 else f"one of {len(ties)} that cannot be told apart")


def gain(slower: Finalist, faster: Finalist) -> Gain:
    """Of the second over the first; see Gain."""
    ratios = sorted(math.log(x / y) for x, y in zip(slower.samples, faster.samples, strict=True))
    low, high = _median_interval(len(ratios))
    return Gain(statistics.median(ratios), ratios[low], ratios[high])


def drift(samples: Sequence[float]) -> float:
    """How far the smallest of the first and of the last third of the samples lie apart, relative to the smaller."""
    third = max(1, len(samples) // 3)
    first, last = min(samples[:third]), min(samples[-third:])
    return abs(first - last) / min(first, last)


def _tied(finalist: Finalist, fastest: Finalist) -> bool:
    if finalist is fastest:
        return True
    found = gain(finalist, fastest)
    return found.low <= 0.0 or found.median < TIE


def _median_interval(count: int) -> tuple[int, int]:
    """The ranks of sorted values between which the median of what they come from lies, with 95 % confidence."""
    tail, low = 0.5**count, 0
    while low < (count - 1) // 2:
        more = tail + math.comb(count, low + 1) * 0.5**count
        if more > (1 - _CONFIDENCE) / 2:
            break
        tail, low = more, low + 1
    return low, count - 1 - low


def finalists(timings: Mapping[Candidate, Timing], always: Sequence[Candidate | None] = ()) -> list[Candidate]:
    """Of those that were screened, the ones to play: those near the best, and the best few in any case, since the card
    may have throttled between two screenings; the best of each path, and those that are always there."""
    ordered = sorted(timings, key=lambda c: timings[c].median)
    best = timings[ordered[0]]
    limit = best.median + max(FINAL_MARGIN * best.median, 3 * best.mad)
    near = sum(timings[c].median <= limit for c in ordered)
    chosen = ordered[: min(max(near, MIN_FINALISTS), MAX_FINALISTS)]
    for path in sorted({c.variant.path for c in timings}):
        chosen.append(next(c for c in ordered if c.variant.path == path))
    chosen += [c for c in ordered if c in always]
    return list(dict.fromkeys(chosen))
