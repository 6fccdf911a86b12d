"""Several devices side by side."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from autodispatch.errors import DeviceError
from autodispatch.fleet import tune_side_by_side
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import A100, H200, FakeVariant, FakeWorkbench, like, registry_of

PROBLEMS = [Problem(m, 64, 64, "float32") for m in range(1, 13)]


def tuners(store: TuningStore) -> list[Tuner]:
    fake = FakeVariant("any")
    fake.kind = "cuda"
    devices = [like(H200, index=0), like(H200, index=1), like(A100, index=2)]
    return [Tuner(store, LocalRunner(FakeWorkbench(d)), Registry(registry_of(fake))) for d in devices]


def test_equal_devices_share_the_problems_and_each_kind_of_device_has_all(store: TuningStore) -> None:
    by_tuner: Counter[int] = Counter()
    together = threading.Barrier(3, timeout=20)
    subjects = tuners(store)

    def one(tuner: Tuner, problem: Problem) -> None:
        if by_tuner[id(tuner)] == 0:
            together.wait()  # all three are at work at once
        by_tuner[id(tuner)] += 1
        tuner.tune(problem)

    tune_side_by_side(subjects, [], PROBLEMS, one)
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

    runners = [Closing(FakeWorkbench(H200))]
    with pytest.raises(DeviceError, match="gone"):
        tune_side_by_side(tuners(store), runners, PROBLEMS, one)
    assert closed == runners
