"""The timing protocol on false clocks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from autodispatch import benchmark
from autodispatch.benchmark import (
    GIVE_UP,
    GIVE_UP_WARM,
    MAX_SAMPLES,
    MIN_SAMPLES,
    CpuWorkbench,
    CudaWorkbench,
    Timing,
    finals,
    screen,
)
from autodispatch.device import cpu_device
from autodispatch.problem import Problem
from autodispatch.variants import VARIANTS


def test_statistics_are_robust_against_one_outlier() -> None:
    timing = Timing((10.0, 10.2, 9.9, 50.0, 10.1))
    assert timing.median == 10.1
    assert timing.mad == pytest.approx(0.1)
    assert timing.percentile(20) == pytest.approx(9.98)


def test_screening_warms_up_by_time_and_bounds_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    calls = []

    def trial() -> float:
        calls.append(None)
        return 10.0

    # every look at the clock advances it by 4 ms, so that a unit seems to take 4 ms
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock) * 0.004)
    timing = screen(trial, None)
    assert MIN_SAMPLES <= len(timing.samples) <= MAX_SAMPLES
    assert len(calls) > len(timing.samples) + 2


def test_screening_leaves_a_hopeless_candidate_after_a_look() -> None:
    calls = []

    def slow() -> float:
        calls.append(None)
        return GIVE_UP * 10.0 + 1

    assert screen(slow, 10.0).median > GIVE_UP * 10
    assert len(calls) == 2


def test_screening_leaves_a_candidate_that_is_behind_when_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock) * 0.004)
    times = itertools.chain([20.0, 14.0, 13.0], itertools.repeat(GIVE_UP_WARM * 10.0 + 0.5))
    behind = screen(lambda: next(times), 10.0)
    assert behind.samples[0] == 13.0  # the warm-up's own, no more
    assert behind.median > GIVE_UP_WARM * 10
    warming = itertools.chain([14.0, 14.0, 13.0], itertools.repeat(11.0))  # cold, it looked behind
    assert set(screen(lambda: next(warming), 10.0).samples) == {11.0}


def test_finals_meet_drift_alike() -> None:
    now = itertools.count()

    def drifting(base: float) -> Callable[[], float]:
        return lambda: base * (1 + 0.3 * next(now) / 90)

    for order in itertools.permutations((10.0, 10.4, 10.8)):
        now = itertools.count()
        timings = finals([drifting(base) for base in order], 30, random.Random(1))
        medians = dict(zip(order, (t.median for t in timings), strict=True))
        assert min(medians, key=medians.__getitem__) == 10.0


def test_finals_play_every_candidate_once_a_round_in_changing_order() -> None:
    played: list[int] = []

    def trial(i: int) -> Callable[[], float]:
        return lambda: played.append(i) or 1.0

    timings = finals([trial(i) for i in range(4)], 6)
    rounds = [tuple(played[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(r) == [0, 1, 2, 3] for r in rounds)
    assert len(set(rounds)) > 1
    assert [len(t.samples) for t in timings] == [6] * 4


def test_the_processors_workbench_checks_and_times_for_real() -> None:
    problem = Problem(16, 48, 32, "float32", "nk")
    bench = CpuWorkbench(cpu_device())
    bench.load(problem)
    for name in ("cpu_split", "cpu_fused"):
        candidate = VARIANTS[name].candidate(problem, bench.device)
        assert candidate is not None
        executable = candidate.executable(problem, bench.device)
        assert bench.check(executable).status == "ok"
        assert bench.trial(executable)() > 0
    assert bench.result().shape == (16, 48)
    bench.unload()


def test_scratch_memory_that_could_not_be_had_is_not_used() -> None:
    def empty(nbytes: int, dtype: object) -> SimpleNamespace:
        if nbytes > 10_000:
            raise MemoryError("too much")
        return SimpleNamespace(size=nbytes)

    bench = object.__new__(CudaWorkbench)
    bench._cupy = SimpleNamespace(empty=empty)
    bench._scratch = None
    small = bench._workspace(SimpleNamespace(workspace_bytes=0))  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        bench._workspace(SimpleNamespace(workspace_bytes=10**10))  # type: ignore[arg-type]
    assert bench._workspace(SimpleNamespace(workspace_bytes=0)) is small  # type: ignore[arg-type]
    assert bench._workspace(SimpleNamespace(workspace_bytes=100)).size > small.size  # type: ignore[arg-type]


def test_others_on_the_device_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, readings = [1000.0], iter([40, 40, 0, 90, 3, 60, 60])
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    bench = object.__new__(CudaWorkbench)
    bench._foreign, bench._looked, bench._last_work = 0, float("-inf"), 0.0
    bench._nvml = SimpleNamespace(busy_percent=lambda: next(readings))  # type: ignore[assignment]
    assert bench.foreign_load() == 40
    bench._last_work = clock[0]
    assert bench.foreign_load() == 0  # they are gone; the reading began a second after our own work
    assert clock[0] == bench._last_work + benchmark.PAUSE_S
    assert bench.foreign_load() == 0  # not counted again so soon
    clock[0] += 31
    assert bench.foreign_load() == 0  # what had just ended
    clock[0] += 31
    assert bench.foreign_load() == 60


def test_rounds_on_a_throttled_clock_are_played_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "THROTTLE_REST_S", 0.0)
    clocks = iter([1900, 1300, 1000, 1890, 1500])
    times = iter([1.0, 99.0, 99.0, 2.0, 3.0])
    (timing,) = finals([lambda: next(times)], 3, clock_mhz=lambda: next(clocks))
    assert timing.samples == (1.0, 2.0, 3.0)
    slow = iter([2000] + [500] * 1000)
    (timing,) = finals([lambda: 1.0], 5, clock_mhz=lambda: next(slow))
    assert len(timing.samples) == 5
