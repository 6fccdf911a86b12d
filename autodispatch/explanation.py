"""Explanation: why a call runs as it does, from the selection and the measurements behind it."""

from __future__ import annotations

import contextlib
import math
import statistics
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from autodispatch import heuristics
from autodispatch.device import DeviceInfo, environment
from autodispatch.errors import StoreError
from autodispatch.layers import Layers
from autodispatch.problem import ITEM_BYTES, Problem, log2_distance
from autodispatch.records import (
    PROTOCOL_VERSION,
    DecisionRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
)
from autodispatch.selection import Origin, Selection, select
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate, Registry
from autodispatch.variants.base import SPLIT

_NEAR_PEAK = 0.6  # of what the device can do at most
_CLEARLY = 0.05  # more, of one
_ENOUGH = 3  # tuned m to say from what is to be expected

# a record serves whatever these are, but its times may not hold
_VERSIONS = {"cuda": ("driver", "cuda_runtime", "nvrtc"), "cpu": ("numpy",)}


class Difference(NamedTuple):
    """A field that should be the same, with what was recorded and what is here."""

    field: str
    recorded: str
    here: str


class Use(NamedTuple):
    """How a candidate uses the device, by its measured time, or the model's where none was measured.

    `blocks` are per SM, and fill the places for them `waves` times; bytes are the fewest that must cross global memory,
    `crossing` those of c1 and c2 of a split candidate, out and back; `memory` and `arithmetic` are shares of the
    device's peaks, 0 where these are not known.
    """

    candidate: Candidate
    path: str
    time_us: float
    launches: int
    blocks: float
    waves: float
    nbytes: int
    crossing: int
    memory: float
    arithmetic: float

    def __str__(self) -> str:
        shares = f", {self.memory:.0%} of the memory's bandwidth, {self.arithmetic:.0%} of the arithmetic peak"
        return (
            f"{self.candidate.variant.name}: {self.time_us:.1f} us, {self.blocks:.2f} blocks per SM in "
            f"{self.waves:.2f} waves, {self.nbytes / 1e6:.1f} MB to move{shares if self.memory else ''}"
        )

    @property
    def idle(self) -> float:
        """The share of its waves' places that no block takes."""
        return 1.0 - self.waves / math.ceil(self.waves) if self.waves else 0.0


@dataclass(frozen=True)
class Explanation:
    """Why a call runs as it does.

    Attributes:
        selection: what was picked, its origin and the reason.
        copied: arguments that are copied first, each with the reason.
        alternatives: the other finalists of the decision behind it, fastest first; empty if nothing was tuned.
        other_path: the fastest of them on the other path (split or fused), if any was measured.
        differences: what was otherwise where the decision was made, though the record serves.
        ties: the finalists that were as fast as the fastest, within noise and 1 %.
        expected_regret: by how much the same rule would have missed the best at the other m that were tuned for these
            n and k, in the median (0.01 is 1 %); 0 where this m was tuned, None where under four fifths of these picks
            were measured, or fewer than three.
        uses: how the pick uses the device, and how the best of the other path would; `why` compares them.
    """

    selection: Selection
    copied: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[MeasurementRecord, ...] = ()
    other_path: MeasurementRecord | None = None
    differences: tuple[Difference, ...] = ()
    ties: tuple[MeasurementRecord, ...] = ()
    expected_regret: float | None = None
    uses: tuple[Use, ...] = ()

    @property
    def distance(self) -> float | None:
        """How many doublings of m lie between the call and the decision that serves it; None if none does."""
        s = self.selection
        return None if s.decision is None else log2_distance(s.problem.m, s.decision.m)

    @property
    def runner_up(self) -> MeasurementRecord | None:
        """The fastest finalist beside the pick."""
        return self.alternatives[0] if self.alternatives else None

    @property
    def verdict(self) -> str:
        """Whether the split path is bound by memory here, and what fusing can gain; empty where nothing can be said."""
        split = next((u for u in self.uses if u.path == SPLIT), None)
        if split is None or not split.memory:
            return ""
        saved = split.crossing
        share = saved / split.nbytes * split.memory
        bound = "memory" if split.memory > split.arithmetic else "arithmetic"
        near = "near its peak" if max(split.memory, split.arithmetic) > _NEAR_PEAK else "though far from its peak"
        return (
            f"the split path is bound by {bound} here, {near}; fusing saves {saved / 1e6:.1f} of its "
            f"{split.nbytes / 1e6:.1f} MB, at the memory's peak {share:.0%} of its time"
        )

    @property
    def why(self) -> str:
        """What the best of the other path does more, or leaves empty, if it takes longer; empty if it does not."""
        if len(self.uses) < 2 or self.uses[1].time_us <= self.uses[0].time_us:
            return ""
        pick, other = self.uses[:2]
        found = []
        if other.nbytes > (1.0 + _CLEARLY) * pick.nbytes:
            found.append(f"moves {other.nbytes / pick.nbytes:.2f} times the bytes")
        if other.launches > pick.launches:
            found.append(f"takes {other.launches} launches instead of {pick.launches}")
        if other.idle > pick.idle + _CLEARLY:
            found.append(f"leaves {other.idle:.0%} of its waves' places empty (the pick {pick.idle:.0%})")
        reasons = ", ".join(found) or "moves hardly more bytes in no more launches, only more slowly"
        return f"{other.candidate.variant.name} takes {other.time_us / pick.time_us:.2f} times as long: it {reasons}"

    @property
    def gain(self) -> float | None:
        """How many times faster the pick is than the best of the other path, both measured in the same finals."""
        median = self.selection.median_us
        if median is None or self.other_path is None or self.other_path.median_us is None:
            return None
        return self.other_path.median_us / median

    def __str__(self) -> str:
        s = self.selection
        lines = [f"{s.problem} on {s.device.name}", f"  {s.candidate}", f"  {s.origin.value}: {s.reason}"]
        if s.layer:
            away = f", {self.distance:.2f} doublings of m away" if self.distance else ""
            lines.append(f"  from: {s.layer}{away}")
        if self.gain is not None and self.other_path is not None:
            lines.append(f"  {self.gain:.2f}x the best of the other path ({self.other_path.variant})")
        if self.runner_up is not None and self.runner_up.median_us:
            at = f" at m = {self.runner_up.m}" if self.distance else ""
            tied = f", {len(self.ties)} tied" if len(self.ties) > 1 else ""
            lines.append(f"  runner-up: {self.runner_up.variant}, {self.runner_up.median_us:.1f} us{at}{tied}")
        if self.expected_regret is not None and s.origin is not Origin.TUNED:
            lines.append(f"  expected regret: {self.expected_regret:.1%}, by the other m that were tuned")
        lines += [f"  {use}" for use in self.uses]
        lines += [f"  {text}" for text in (self.why, self.verdict) if text]
        lines += [f"  measured with {d.field} {d.recorded}, here {d.here}" for d in self.differences]
        lines += [f"  copied first: {name}, since {why}" for name, why in self.copied]
        return "\n".join(lines)


def explain(
    problem: Problem,
    device: DeviceInfo,
    registry: Registry,
    layers: Layers | None,
    pinned: Candidate | None = None,
    copied: tuple[tuple[str, str], ...] = (),
    max_error: float | None = None,
) -> Explanation:
    """The selection for a problem with what was measured beside it. Raises UnsupportedProblemError."""
    selection = select(problem, device, registry, layers, pinned, max_error)
    if layers is None:
        return Explanation(selection, copied, uses=_uses(selection, None, registry))
    regret = 0.0 if selection.origin is Origin.TUNED else None
    if selection.origin in (Origin.BUCKET, Origin.HEURISTIC):
        regret = _expected_regret(problem, device, registry, layers)
    if selection.decision is None:
        return Explanation(selection, copied, expected_regret=regret, uses=_uses(selection, None, registry))
    store = next(s for name, s in layers if name == selection.layer)
    records = _finalists(store, selection.decision)
    picked = selection.candidate.key
    others = tuple(r for r in records if (r.variant, r.config) != picked)
    path = selection.candidate.variant.path
    paths = {name: v.path for name, v in registry.variants.items()}
    other = next((r for r in others if paths.get(r.variant, path) != path), None)
    ties = tuple(r for r in records if r.id in selection.decision.ties)
    differences = _differences(store, selection.decision, device)
    uses = _uses(selection, other if selection.median_us is not None else None, registry)  # both measured, or neither
    return Explanation(selection, copied, others, other, differences, ties, regret, uses)


def _finalists(store: TuningStore, decision: DecisionRecord) -> list[MeasurementRecord]:
    found = (store.measurement(i) for i in decision.finalists)
    return sorted((r for r in found if r is not None), key=lambda r: r.median_us or 0.0)


def _crossing(candidate: Candidate, problem: Problem) -> int:
    """Bytes that c1 and c2 of a split candidate take out to memory and back, as often as k is shared out."""
    if candidate.variant.path != SPLIT:
        return 0
    item = ITEM_BYTES[getattr(candidate.config, "intermediate", "float32")]
    return 2 * 2 * item * getattr(candidate.config, "split_k", 1) * problem.m * problem.n


def _uses(selection: Selection, other: MeasurementRecord | None, registry: Registry) -> tuple[Use, ...]:
    """Of the pick and of the best of the other path: by its record, or by the model where there is none."""
    problem, device = selection.problem, selection.device
    path = selection.candidate.variant.path
    m = selection.decision.m if selection.decision else problem.m
    pairs: list[tuple[Candidate, float | None]] = [(selection.candidate, selection.median_us)]
    if other is not None:
        with contextlib.suppress(ValueError):  # of another version
            pairs.append((registry.parse(other.variant, other.config), other.median_us))
    else:
        rivals = [c for c in registry.candidates(problem, device) if c.variant.path != path]
        pairs += [(c, None) for c in heuristics.rank(rivals, problem, device)[:1]]
    found = []
    for candidate, median_us in pairs:
        at = problem if median_us is None else replace(problem, m=m)
        seconds = heuristics.predict(candidate, at, device).total if median_us is None else median_us / 1e6
        crossing = _crossing(candidate, at)
        nbytes = at.bytes_moved + crossing
        flops, bandwidth = heuristics.peaks(at, device)
        shares = (nbytes / seconds / bandwidth, at.flops / seconds / flops) if flops and bandwidth else (0.0, 0.0)
        work = candidate.variant.work(candidate.config, at)
        grid = (work.launches, work.blocks / max(device.sm_count, 1), heuristics.waves(work, device))
        found.append(Use(candidate, candidate.variant.path, seconds * 1e6, *grid, nbytes, crossing, *shares))
    return tuple(found)


def _expected_regret(problem: Problem, device: DeviceInfo, registry: Registry, layers: Layers) -> float | None:
    """The median over the tuned m of these n and k of what is lost there if that m alone had not been tuned; None if
    too few of the picks were measured there to say."""
    found: list[float] = []
    asked = 0
    for name, store in layers:
        try:
            decisions = store.near_decisions(device.key, problem, 0, float("inf"))
            for decision in decisions:
                rest = _Without(store, decision.m)
                there = replace(problem, m=decision.m)
                pick = select(there, device, registry, Layers([(name, cast(TuningStore, rest))])).candidate.key
                measured = store.measurements(device.key, there)
                screened = {(r.variant, r.config): r.median_us for r in measured if r.median_us}
                finals = {(r.variant, r.config): r.median_us for r in _finalists(store, decision) if r.median_us}
                times = {**screened, **finals}
                asked += 1
                if pick in times:
                    found.append(times[pick] / min(finals.values()) - 1.0)
        except StoreError:
            continue
    return statistics.median(found) if len(found) >= max(_ENOUGH, 0.8 * asked) else None


class _Without:
    """A store in which nothing was decided for one m."""

    def __init__(self, store: TuningStore, m: int) -> None:
        self._store, self._m = store, m

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def decisions(self, device_key: str, problem: Problem) -> list[DecisionRecord]:
        return [d for d in self._store.decisions(device_key, problem) if d.m != self._m]

    def near_decisions(self, device_key: str, problem: Problem, lowest: float, highest: float) -> list[DecisionRecord]:
        return [d for d in self._store.near_decisions(device_key, problem, lowest, highest) if d.m != self._m]


def _differences(store: TuningStore, decision: DecisionRecord, device: DeviceInfo) -> tuple[Difference, ...]:
    session = store.one(SessionRecord, decision.session_id)
    if session is None:
        return ()
    versions = store.one(EnvironmentRecord, session.environment_id)
    here = environment(device)
    pairs: list[tuple[str, object, object]] = [("timing protocol", session.protocol_version, PROTOCOL_VERSION)]
    if versions is not None:
        pairs += [(f.replace("_", " "), getattr(versions, f), here[f]) for f in _VERSIONS[device.kind]]
    return tuple(Difference(name, str(x), str(y)) for name, x, y in pairs if x != y)
