"""Decisions that were made elsewhere, measured again on this device. What holds becomes this machine's own decision;
what does not is replaced by what was measured here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from autodispatch.device import DeviceInfo
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord, SessionRecord
from autodispatch.selection import stored_candidate
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Candidate, Registry


@dataclass(frozen=True)
class Foreign:
    """A usable decision of another machine: the candidates that it puts first, its pick leading, and where it lies."""

    problem: Problem
    layer: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Verdict:
    """What a decision came to here. `slowdown` is the time of its pick over that of the pick here."""

    foreign: Foreign
    pick: Candidate
    slowdown: float | None

    @property
    def holds(self) -> bool:
        return self.pick == self.foreign.candidates[0]


def foreign_decisions(layers: Layers, device: DeviceInfo, registry: Registry, host: str | None = None) -> list[Foreign]:
    """The decisions for this device model that serve here and were not measured on this host."""
    host = host or socket.gethostname()
    found: dict[Problem, Foreign] = {}
    own: set[Problem] = set()
    for name, store in layers:
        hosts = {s.id: s.host for s in store.all_of(SessionRecord)}
        for decision in store.all_of(DecisionRecord, device.key):
            problem = decision.problem
            if hosts.get(decision.session_id) == host:
                own.add(problem)
            candidates = _usable(store, decision, problem, device, registry)
            if candidates and problem not in found:
                found[problem] = Foreign(problem, name, candidates)
    return [f for p, f in found.items() if p not in own]


def verify(tuner: Tuner, store: TuningStore, foreign: Foreign, registry: Registry) -> Verdict:
    """Measures a decision's pick, its runner-up and what would run untuned against each other.

    The outcome goes into the user's database, which comes before all others. Raises AutodispatchError if none is right.
    """
    candidates = dict.fromkeys((*foreign.candidates, tuner.default(foreign.problem)))
    decision = tuner.retime(foreign.problem, list(candidates))
    records = [r for i in decision.finalists if (r := store.measurement(i)) is not None]
    times = {(r.variant, r.config): r.median_us for r in records if r.median_us is not None}
    pick = registry.parse(records[0].variant, records[0].config)
    theirs = times.get(foreign.candidates[0].key)
    return Verdict(foreign, pick, theirs / times[pick.key] if theirs is not None else None)


def _usable(
    store: TuningStore, decision: DecisionRecord, problem: Problem, device: DeviceInfo, registry: Registry
) -> tuple[Candidate, ...]:
    """The decision's pick and runner-up as candidates; nothing if the pick is not what this version would run."""
    records = [store.measurement(i) for i in decision.finalists[:2]]
    usable = [stored_candidate(r, problem, device, registry) if r is not None else None for r in records]
    return tuple(c for c in usable if c is not None) if usable and usable[0] is not None else ()


def sample(decisions: Sequence[Foreign], count: int) -> list[Foreign]:
    """At most so many, spread evenly over all."""
    step = max(1.0, len(decisions) / max(count, 1))
    return [decisions[int(i * step)] for i in range(min(count, len(decisions)))]
