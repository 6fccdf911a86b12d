"""Several devices side by side."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from autodispatch.device import cpu_device
from autodispatch.errors import DeviceError
from autodispatch.fleet import tune_side_by_side
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import FakeVariant, FakeWorkbench, like, registry_of

CPU = cpu_device()
PROBLEMS = [Problem(m, 64, 64, "float32") for m in range(1, 13)]


def tuners(store: TuningStore, runner: type[LocalRunner] = LocalRunner) -> list[Tuner]:
    fakes = Registry(registry_of(FakeVariant("any")))
    devices = [like(CPU, name=name) for name in ("one kind", "one kind", "another kind")]
    return [Tuner(store, runner(FakeWorkbench(d)), fakes) for d in devices]


def test_equal_devices_share_the_problems_and_each_kind_of_device_has_all(store: TuningStore) -> None:
    by_tuner: Counter[int] = Counter()
    together = threading.Barrier(3, timeout=20)
    subjects = tuners(store)

    def one(tuner: Tuner, problem: Problem) -> None:
        if by_tuner[id(tuner)] == 0:
            together.wait()  # all three are at work at once
        by_tuner[id(tuner)] += 1
        tuner.tune(problem)

    tune_side_by_side(subjects, PROBLEMS, one)
    assert store.counts()["decisions"] == 2 * len(PROBLEMS)
    assert by_tuner[id(subjects[2])] == len(PROBLEMS)
    assert by_tuner[id(subjects[0])] + by_tuner[id(subjects[1])] == len(PROBLEMS)


def test_an_error_in_one_thread_ends_all_and_closes_the_runners(store: TuningStore) -> None:
    closed = []

    class Closing(LocalRunner):
        def close(self) -> None:
            closed.append(self)

    def one(tuner: Tuner, problem: Problem) -> None:
        raise DeviceError("gone")

    subjects = tuners(store, Closing)
    with pytest.raises(DeviceError, match="gone"):
        tune_side_by_side(subjects, PROBLEMS, one)
    assert closed == [s._runner for s in subjects]
