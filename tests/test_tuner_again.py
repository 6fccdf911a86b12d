"""Tunings of what was tuned before, or is being tuned by others: they go on, agree, and keep what is as good."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autodispatch import benchmark
from autodispatch import tuner as tuner_module
from autodispatch.benchmark import Trial
from autodispatch.records import DecisionRecord
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Progress, Tuner
from autodispatch.variants import Registry
from tests.fakes import FakeVariant, FakeWorkbench, registry_of
from tests.tuning import CPU, PROBLEM, checked, leader, tuner


def test_processes_that_tune_one_problem_at_once_end_with_one_candidate(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import FakeVariant, FakeWorkbench, like, registry_of
from tests.tuning import CPU, PROBLEM, leader
own = int(sys.argv[2])
times = {f"v{i}": (lambda t=10.0 + 5 * (i != own): t) for i in range(4)}
store = TuningStore(Path(sys.argv[1]))
runner = LocalRunner(FakeWorkbench(like(CPU, uuid="of-the-test"), times))
tuner = Tuner(store, runner, Registry(registry_of(*(FakeVariant(n) for n in times))))
print("ready", flush=True)
sys.stdin.readline()
print(leader(store, tuner.tune(PROBLEM)).variant, leader(store, store.decision(CPU.key, PROBLEM)).variant)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "tuning.db"), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert len(found) == 1
    (pair,) = found
    assert pair.split()[0] == pair.split()[1]


def test_what_another_process_decided_while_this_one_waited_is_taken(
    store: TuningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = FakeVariant("first", speeds=(10,)), FakeVariant("second", speeds=(11,))
    before = tuner(store, *variants).tune(PROBLEM)
    waiting = tuner(store, *variants)
    other = tuner(store, *variants)
    wait_for = tuner_module.timing_on

    @contextmanager
    def while_another_tunes(uuid: str) -> Iterator[None]:
        monkeypatch.setattr(tuner_module, "timing_on", wait_for)
        other.tune(PROBLEM)
        with wait_for(uuid):
            yield

    monkeypatch.setattr(tuner_module, "timing_on", while_another_tunes)
    taken = waiting.tune(PROBLEM)
    assert taken != before and taken == store.decision(CPU.key, PROBLEM)
    assert checked(waiting) == []


def test_a_problem_is_tuned_when_the_candidates_of_the_effort_were_tried_with_todays_kernels(
    store: TuningStore,
) -> None:
    many = FakeVariant("many", speeds=tuple(range(20, 50)))  # of which full tries more than quick
    subject = tuner(store, many)
    assert not subject.is_tuned(PROBLEM) and not subject.has_decision(PROBLEM)
    subject.tune(PROBLEM, budget_s=0.0)
    assert not subject.is_tuned(PROBLEM) and subject.has_decision(PROBLEM)
    subject.tune(PROBLEM)
    assert subject.is_tuned(PROBLEM) and not subject.is_tuned(PROBLEM, "full")
    subject.tune(PROBLEM, effort="full")
    assert subject.is_tuned(PROBLEM, "full")
    assert not tuner(store, FakeVariant("many", speeds=tuple(range(20, 50)), digest="d2")).is_tuned(PROBLEM)
    assert not tuner(store, many, FakeVariant("new")).is_tuned(PROBLEM)


def test_a_tuning_under_the_smallest_budget_comes_to_its_end(store: TuningStore) -> None:
    variants = [FakeVariant(f"v{i}", speeds=(i + 10,)) for i in range(4)]
    decisions = [tuner(store, *variants).tune(PROBLEM, budget_s=0.0) for _ in range(5)]
    assert [len(d.finalists) for d in decisions] == [1, 2, 3, 4, 4]  # a candidate each time, and then the finals
    assert [d.complete for d in decisions] == [False] * 4 + [True]


def test_a_candidate_without_memory_keeps_small_budgets_from_no_end(store: TuningStore) -> None:
    variants = [FakeVariant(f"v{i}", speeds=(i + 10,)) for i in range(3)]
    checks = {"v1": MemoryError("too large")}  # which is tried again each time
    decisions = [tuner(store, *variants, checks=checks).tune(PROBLEM, budget_s=0.0) for _ in range(3)]
    assert [len(d.finalists) for d in decisions] == [1, 2, 2]
    assert [d.complete for d in decisions] == [False, False, True]


def test_a_candidate_that_failed_is_not_tried_again_until_its_kernels_change(store: TuningStore) -> None:
    checks = {"wrong": Check("wrong_result", "as the test says", 0.5, 3.0), "large": MemoryError("too large")}
    every = ["wrong", "large", "right"]
    for digest, tried in (("d1", every), ("d1", every[1:]), ("d2", every)):
        variants = [FakeVariant(n, speeds=(i + 1,), digest=digest) for i, n in enumerate(every)]
        subject = tuner(store, *variants, checks=checks)
        assert leader(store, subject.tune(PROBLEM)).variant == "right"
        assert checked(subject) == tried


def test_a_tuning_that_did_not_come_to_its_end_goes_on_where_it_stopped(store: TuningStore) -> None:
    variants = [FakeVariant(f"v{i}", speeds=(i + 10,)) for i in range(5)]
    first = tuner(store, *variants).tune(PROBLEM, budget_s=0.0)
    assert not first.complete
    subject = tuner(store, *variants)
    second = subject.tune(PROBLEM)
    assert checked(subject) == [f"v{i}" for i in range(1, 5)]
    assert second.complete
    again = tuner(store, *variants)
    again.tune(PROBLEM)
    assert len(checked(again)) == 5


def test_a_resumed_tuning_counts_what_was_measured_before_among_what_is_done(store: TuningStore) -> None:
    variants = [FakeVariant(f"v{i}", speeds=(i + 10,)) for i in range(5)]
    tuner(store, *variants).tune(PROBLEM, budget_s=0.0)
    heard: list[Progress] = []
    tuner(store, *variants, listener=heard.append).tune(PROBLEM)
    screened = [(p.done, p.total) for p in heard if p.stage == "screen"]
    assert (screened[0], screened[-1]) == ((1, 5), (5, 5))
    hits = [(p.candidate.variant.name, p.record.median_us) for p in heard if p.is_hit and p.candidate and p.record]
    assert hits == [("v0", 10.0)]


def test_all_that_cannot_be_told_apart_are_stored_and_the_incumbent_stays(store: TuningStore) -> None:
    def run(**times: float) -> DecisionRecord:
        fakes: dict[str, Callable[[], float]] = {n: (lambda t=t: t) for n, t in times.items()}
        return tuner(store, *(FakeVariant(n) for n in times), times=fakes).tune(PROBLEM)

    first = run(a=12.0, b=10.0, c=10.05)
    assert leader(store, first).variant == "b"
    second = run(a=12.0, b=10.05, c=10.0)
    assert leader(store, second).variant == "b"
    names = [found.variant for i in second.ties if (found := store.measurement(i)) is not None]
    assert names == ["c", "b"]
    assert leader(store, run(a=12.0, b=10.5, c=10.0)).variant == "c"


def test_what_was_decided_before_is_tried_again_also_where_the_model_would_not(store: TuningStore) -> None:
    many = FakeVariant("many", speeds=tuple(range(30, 60)))
    other = FakeVariant("other", "split", (100,))
    odd = '{"speed":55}'  # which the model, that believes in small numbers, does not expect to win
    times = {"other": lambda: 100.0}
    full = Tuner(store, LocalRunner(Odd(CPU, times)), Registry(registry_of(many, other)))
    assert leader(store, full.tune(PROBLEM, effort="full")).config == odd
    again = Tuner(store, LocalRunner(Odd(CPU, times)), Registry(registry_of(many, other)))
    assert odd not in {c.config.to_json() for c in again.shortlist(PROBLEM, "quick")}
    assert leader(store, again.tune(PROBLEM)).config == odd


class Odd(FakeWorkbench):
    """The candidate of speed 55 is the fastest."""

    def trial(self, executable: Any) -> Trial:
        return (lambda: 1.0) if getattr(executable, "speed", 0) == 55 else super().trial(executable)


class Weather:
    """A GPU's bad days, the same for all that run on one: its clock drifts, it throttles after a while, and now and
    then something else runs. Time passes with every sample."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._samples = 0
        self._throttled_from = self._rng.randrange(50, 400)

    def timer(self, true_us: float) -> Callable[[], float]:
        def sample() -> float:
            self._samples += 1
            drift = 1 + 0.04 * math.sin(self._samples / 60)
            throttle = 1.15 if self._samples > self._throttled_from else 1.0
            outlier = self._rng.uniform(1.3, 4.0) if self._rng.random() < 0.05 else 1.0
            return true_us * drift * throttle * outlier * (1 + abs(self._rng.gauss(0, 0.01)))

        return sample


def test_tunings_from_nothing_agree_whatever_the_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    # as many samples however fast this machine is
    monkeypatch.setattr(benchmark, "WARM_UP_S", 0.0)
    monkeypatch.setattr(benchmark, "MIN_SAMPLES", benchmark.MAX_SAMPLES)
    true = {"a": 10.0, "b": 10.04, "c": 10.4, "d": 10.9, "e": 13.0, "f": 24.0}
    picks = []
    for seed in range(20):
        weather = Weather(seed)
        store = TuningStore()
        times = {name: weather.timer(us) for name, us in true.items()}
        # the cost model, which sees the speeds, believes in another candidate than the fastest
        variants = [FakeVariant(n, "split" if n == "e" else "fused", (i,)) for i, n in enumerate("dfecba", start=1)]
        picks.append(leader(store, tuner(store, *variants, times=times).tune(PROBLEM)).variant)
        store.close()
    flips = len(picks) - max(picks.count(name) for name in true)
    regrets = [true[name] / true["a"] - 1 for name in picks]
    assert flips == 0, picks
    assert max(regrets) < 0.02, picks


TUNES = """
import sys
from pathlib import Path
from autodispatch.benchmark import CpuWorkbench
from autodispatch.device import cpu_device
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner

def tell(step):
    if step.record is not None and not step.is_hit:
        print(step.record.id, flush=True)

tuner = Tuner(TuningStore(Path(sys.argv[1])), LocalRunner(CpuWorkbench(cpu_device())), listener=tell)
for m in range(int(sys.argv[2]), 10_000):
    tuner.tune(Problem(m, 32, 16, "float32"), effort="full")
"""


def test_a_tuning_that_is_killed_at_any_moment_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    rng = random.Random(5)
    finished: set[str] = set()
    for turn in range(4):
        command = [sys.executable, "-c", TUNES, str(tmp_path / "t.db"), str(1 + turn)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(rng.randrange(2, 12)):
                finished.add(process.stdout.readline().strip())
            time.sleep(rng.uniform(0.0, 0.2))
            process.kill()
            told, _, _ = process.communicate()[0].rpartition("\n")  # what it told before it was killed
            finished.update(told.split())
        store = TuningStore(tmp_path / "t.db")
        assert store.write(lambda db: db.execute("PRAGMA integrity_check").fetchall()) == [("ok",)]
        assert finished <= {r.id for r in store.measurements()}
        store.close()
    assert "" not in finished and len(finished) > 8
