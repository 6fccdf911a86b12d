"""Explanation: why a call runs as it does, from the selection and the measurements behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autodispatch.device import DeviceInfo, environment
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import (
    PROTOCOL_VERSION,
    DecisionRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
)
from autodispatch.selection import Selection, select
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate, Registry

# a record serves whatever these are, but its times may not hold
_VERSIONS = {"cuda": ("driver", "cuda_runtime", "nvrtc"), "cpu": ("numpy",)}


class Difference(NamedTuple):
    """A field that should be the same, with what was recorded and what is here."""

    field: str
    recorded: str
    here: str


@dataclass(frozen=True)
class Explanation:
    """Why a call runs as it does.

    Attributes:
        selection: what was picked, its origin and the reason.
        copied: arguments that are copied first, each with the reason.
        alternatives: the other finalists of the decision behind it, fastest first; empty if nothing was tuned.
        other_path: the fastest of them on the other path (split or fused), if any was measured.
        differences: what was otherwise where the decision was made, though the record serves.
    """

    selection: Selection
    copied: tuple[tuple[str, str], ...] = ()
    alternatives: tuple[MeasurementRecord, ...] = ()
    other_path: MeasurementRecord | None = None
    differences: tuple[Difference, ...] = ()

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
            lines.append(f"  from: {s.layer}")
        if self.gain is not None and self.other_path is not None:
            lines.append(f"  {self.gain:.2f}x the best of the other path ({self.other_path.variant})")
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
) -> Explanation:
    """The selection for a problem with what was measured beside it. Raises UnsupportedProblemError."""
    selection = select(problem, device, registry, layers, pinned)
    if selection.decision is None or layers is None:
        return Explanation(selection, copied)
    store = next(s for name, s in layers if name == selection.layer)
    found = [store.measurement(i) for i in selection.decision.finalists]
    others = tuple(r for r in found if r is not None and r.id != selection.decision.leader)
    path = selection.candidate.variant.path
    paths = {name: v.path for name, v in registry.variants.items()}
    other = next((r for r in others if paths.get(r.variant, path) != path), None)
    return Explanation(selection, copied, others, other, _differences(store, selection.decision, device))


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
