"""Tuners on fakes, and what they left behind, for the tests."""

from __future__ import annotations

from typing import Any

from autodispatch.device import cpu_device
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord, MeasurementRecord
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import FakeVariant, FakeWorkbench, registry_of

PROBLEM = Problem(64, 64, 64, "float32")
CPU = cpu_device()


def tuner(store: TuningStore, *variants: FakeVariant, **options: Any) -> Tuner:
    listener = options.pop("listener", None)
    runner = LocalRunner(FakeWorkbench(CPU, **options))
    return Tuner(store, runner, Registry(registry_of(*variants)), listener=listener)


def by_variant(store: TuningStore, stage: str) -> dict[str, MeasurementRecord]:
    return {r.variant: r for r in store.measurements(problem=PROBLEM) if r.stage == stage}


def leader(store: TuningStore, decision: DecisionRecord) -> MeasurementRecord:
    found = store.measurement(decision.leader)
    assert found is not None
    return found


def checked(subject: Tuner) -> list[str]:
    """The names of the fakes that were tried, in order."""
    log = subject._runner.bench.log  # type: ignore[attr-defined]
    return list(dict.fromkeys(line.removeprefix("check ") for line in log if line.startswith("check")))
