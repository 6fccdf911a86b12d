"""select(): which candidate serves a problem on a device, where the choice came from, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from autodispatch import heuristics
from autodispatch.device import DeviceInfo
from autodispatch.errors import StoreError, UnsupportedProblemError
from autodispatch.layers import Layers
from autodispatch.problem import Problem, log2_distance
from autodispatch.records import DecisionRecord, DeviceRecord, MeasurementRecord
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate, Registry

_log = logging.getLogger("autodispatch")
MAX_BUCKET_DISTANCE = 1.0  # doublings of m between a call and the tuned problem that serves it
_AGREES, _CLEARLY = 0.05, 0.08  # of a time, by the cost model


class Origin(str, Enum):
    """Where a selection came from."""

    TUNED = "tuned"  # decided by measurement for exactly this problem
    BUCKET = "bucket"  # decided for the nearest m, at most a factor 2 away, all else equal, or moved from there
    HEURISTIC = "heuristic"  # fastest by the cost model
    LIBRARY = "library"  # the last resort
    PINNED = "pinned"  # the caller named it


@dataclass(frozen=True)
class Selection:
    """What was picked for a problem.

    `layer` and `decision` are set for `tuned` and `bucket`; `median_us` is the time measured for the decision's own m,
    None where the cost model put another candidate in the place of the one that was decided for.
    """

    candidate: Candidate
    origin: Origin
    reason: str
    problem: Problem
    device: DeviceInfo
    layer: str | None = None
    decision: DecisionRecord | None = None
    median_us: float | None = None


def select(
    problem: Problem,
    device: DeviceInfo,
    registry: Registry,
    layers: Layers | None = None,
    pinned: Candidate | None = None,
    max_error: float | None = None,
) -> Selection:
    """The best selection; see `selections`. Raises UnsupportedProblemError if nothing can serve the problem."""
    return next(selections(problem, device, registry, layers, pinned, max_error))


def selections(
    problem: Problem,
    device: DeviceInfo,
    registry: Registry,
    layers: Layers | None = None,
    pinned: Candidate | None = None,
    max_error: float | None = None,
) -> Iterator[Selection]:
    """All selections in order of preference, so that a caller can go on where one does not build: what was tuned for
    the problem, for its bucket of m, the cost model's choice, the library, then the other variants' defaults.

    With `max_error` only what was measured counts, and of that what kept it; UnsupportedProblemError if nothing did.
    """
    if max_error is not None and not (isinstance(max_error, (int, float)) and max_error > 0):
        raise ValueError(f"max_error must be a positive number (got {max_error!r})")
    if pinned is not None:
        yield Selection(pinned, Origin.PINNED, "the caller named it", problem, device)
        return
    if layers is not None:
        yield from stored_selections(problem, device, registry, layers, max_error)
    if max_error is not None:
        raise UnsupportedProblemError(
            f"some candidate of {problem} must be known to keep max_error {max_error:g} (got none that was measured "
            f"on {device.name}); to measure it: autodispatch tune {problem.options}"
        )
    found = False
    ranked = heuristics.rank(registry.candidates(problem, device), problem, device)
    if ranked:
        found = True
        estimate = heuristics.predict(ranked[0], problem, device)
        work = ranked[0].variant.work(ranked[0].config, problem)
        reason = (
            f"the cost model expects {estimate.total * 1e6:.1f} us, bound by {estimate.bound}, "
            f"with {work.blocks} blocks on {device.sm_count} {'cores' if device.kind == 'cpu' else 'SMs'}, "
            f"the fastest of {len(ranked)} candidates; nothing near was tuned"
            f"{near_miss(problem, device, registry, layers)}"
        )
        yield Selection(ranked[0], Origin.HEURISTIC, reason, problem, device)
    library = registry.library(problem, device)
    if library is not None:
        found = True
        yield Selection(library, Origin.LIBRARY, "the library serves what nothing else does", problem, device)
    for candidate in registry.defaults(problem, device):
        if candidate != library:
            found = True
            yield Selection(candidate, Origin.HEURISTIC, "the default of a remaining variant", problem, device)
    if not found:
        raise UnsupportedProblemError(f"some variant must serve {problem} on {device.name} (got none that can)")


def near_miss(problem: Problem, device: DeviceInfo, registry: Registry, layers: Layers | None) -> str:
    """What does not serve though a user may expect it to: records of like devices, with the fields that differ, and
    decisions for the problem that this version's code does not fit."""
    found: list[str] = []
    here = DeviceRecord.of(device)
    for _, store in layers or ():
        try:
            for other in store.similar_devices(here, problem):
                differ = [f"{f} {getattr(other, f)}" for f, x in device.identity.items() if getattr(other, f) != x]
                found.append(f"records of {other.key} ({', '.join(differ)}) are not for this {device.key}")
            for decision in (*store.decisions(device.key, problem), *_near(store, device.key, problem)):
                record = store.measurement(decision.leader)
                reason = _examined(record, problem, device, registry)[1] if record is not None else ""
                if reason:
                    found.append(f"of the decision for m = {decision.m} {reason}")
        except StoreError as cause:
            _log.warning("%s; it is left out of this look-up", cause)
    return f" ({'; '.join(dict.fromkeys(found))})" if found else ""


def stored_selections(
    problem: Problem,
    device: DeviceInfo,
    registry: Registry,
    layers: Layers,
    max_error: float | None,
    *,
    strict: bool = False,
) -> Iterator[Selection]:
    """What was tuned for the problem in any layer, then what was for the nearest m, or the cost model moves from there:
    the first of `selections`.

    A store that cannot be read is left out with a warning; if `strict`, it raises StoreError.
    """
    for origin in (Origin.TUNED, Origin.BUCKET):
        found = []
        for order, (name, store) in enumerate(layers):
            try:
                if origin is Origin.TUNED:
                    decisions = store.decisions(device.key, problem)
                else:
                    decisions = _near(store, device.key, problem)
            except StoreError as cause:
                if strict:
                    raise
                _log.warning("%s; it is left out of this look-up", cause)
                continue
            found += [(log2_distance(problem.m, d.m), -d.m, order, d, name, store) for d in decisions]
        for *_, decision, name, store in sorted(found, key=lambda x: x[:3]):
            try:
                ids = [decision.leader] if max_error is None else list(dict.fromkeys(decision.finalists))
                records = [r for i in ids if (r := store.measurement(i)) is not None]
            except StoreError as cause:
                if strict:
                    raise
                _log.warning("%s; it is left out of this look-up", cause)
                continue
            for record in records:
                if max_error is None or (record.max_error is not None and record.max_error <= max_error):
                    selection = _usable(decision, record, origin, name, problem, device, registry)
                    if selection is None:
                        continue
                    if origin is Origin.BUCKET and max_error is None:
                        yield from _moved(selection, decision.m, registry)
                    yield selection


def _near(store: TuningStore, device_key: str, problem: Problem) -> list[DecisionRecord]:
    factor = 2.0**MAX_BUCKET_DISTANCE
    return store.near_decisions(device_key, problem, problem.m / factor, problem.m * factor)


def _moved(near: Selection, m: int, registry: Registry) -> Iterator[Selection]:
    """What the cost model puts before a pick that was tuned for m: its own choice, if it agrees with what was measured
    there and yet expects the pick to take clearly longer here, as where its tiles fill the last round badly."""
    problem, device = near.problem, near.device
    choice, instead = _expected_fastest(problem, device, registry)
    expected = heuristics.predict(near.candidate, problem, device).total
    if expected <= (1 + _CLEARLY) * instead:
        return
    there = replace(problem, m=m)
    _, best = _expected_fastest(there, device, registry)
    if heuristics.predict(near.candidate, there, device).total <= (1 + _AGREES) * best:
        reason = (
            f"the cost model, which agrees with the pick at m = {m}, the nearest tuned m ({near.candidate}), "
            f"expects {instead * 1e6:.1f} us here, and {expected * 1e6:.1f} of that pick"
        )
        yield replace(near, candidate=choice, reason=reason, median_us=None)


@lru_cache(maxsize=10_000)
def _expected_fastest(problem: Problem, device: DeviceInfo, registry: Registry) -> tuple[Candidate, float]:
    """The cost model's choice and its seconds; ranking all candidates takes some milliseconds."""
    choice = heuristics.rank(registry.candidates(problem, device), problem, device)[0]
    return choice, heuristics.predict(choice, problem, device).total


def stored_candidate(
    record: MeasurementRecord, problem: Problem, device: DeviceInfo, registry: Registry
) -> Candidate | None:
    """The candidate of a record, or None if this version's code is not what was measured, or not legal here."""
    candidate, reason = _examined(record, problem, device, registry)
    if reason:
        _log.debug("a record is not used: of %s %s", record.id, reason)
        return None
    return candidate


def _examined(
    record: MeasurementRecord, problem: Problem, device: DeviceInfo, registry: Registry
) -> tuple[Candidate | None, str]:
    """A record's candidate, and what of it does not fit this version's code or the problem; empty if all does."""
    try:
        candidate = registry.parse(record.variant, record.config)
    except ValueError as cause:
        return None, f"the candidate is not known ({cause})"
    if candidate.variant.digest != record.digest:
        return candidate, f"the kernels of {record.variant} have changed since it was tuned"
    return candidate, "; ".join(f"{record.variant} requires {v}" for v in candidate.violations(problem, device))


def _standing(decision: DecisionRecord) -> str:
    """How the pick stood in the finals. A record that knows of no ties was decided by the median alone."""
    if decision.leader in decision.ties and len(decision.ties) > 1:
        return f"one of the {len(decision.ties)} fastest"
    return "the fastest" if decision.leader in decision.ties or not decision.ties else "hardly slower than the fastest"


def _usable(
    decision: DecisionRecord,
    record: MeasurementRecord,
    origin: Origin,
    layer: str,
    problem: Problem,
    device: DeviceInfo,
    registry: Registry,
) -> Selection | None:
    """A finalist of a decision as a selection, or None if this version's code is not what was measured."""
    if record.median_us is None or record.status != "ok":
        return None
    candidate = stored_candidate(record, problem, device, registry)
    if candidate is None:
        return None
    standing = _standing(decision) if record.id == decision.leader else "which keeps the error asked for"
    reason = f"measured {record.median_us:.1f} us, {standing} of {len(decision.finalists)} finalists"
    if origin is Origin.BUCKET:
        reason += f" at m = {decision.m}, the nearest tuned m"
    return Selection(candidate, origin, reason, problem, device, layer, decision, record.median_us)
