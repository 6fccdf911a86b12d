"""What serves a problem, and what happens beside its calls: reloads, tunings, pins, strictness, bounds on the error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodispatch import planning, selection, worker
from autodispatch.benchmark import CpuWorkbench
from autodispatch.device import cpu_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import NotTunedError, UnsupportedProblemError
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Candidate, Registry
from tests import stored
from tests.fakes import FakeVariant

CPU = cpu_device()
PROBLEM = Problem(24, 40, 32, "float32")
RNG = np.random.default_rng(0)
ARGUMENTS = tuple(RNG.standard_normal(s).astype(np.float32) for s in ((24, 32), (32, 40), (32, 40)))


def origin(d: Dispatcher) -> Origin:
    ready = d.planner.find(PROBLEM, CPU, None, None)
    assert ready is not None
    return ready.selection.origin


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    assert what()


def tune(path: Path) -> None:
    store = TuningStore(path)
    Tuner(store, LocalRunner(CpuWorkbench(CPU))).tune(PROBLEM)
    store.close()


def test_what_another_connection_tuned_is_served_without_a_restart(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0.02))
    d.run(*ARGUMENTS)
    assert origin(d) is Origin.HEURISTIC
    tune(tmp_path / "t.db")
    wait_for(lambda: origin(d) is Origin.TUNED)
    before = d.counters().calls
    d.run(*ARGUMENTS)
    assert before == {"heuristic": 1, "tuned": 0}
    assert d.counters().calls == {"heuristic": 1, "tuned": 1}
    d.close()


def test_where_a_moved_pick_does_not_build_the_near_one_serves_even_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = FakeVariant("broken", speeds=(0,), build_error="an #error")
    registry = Registry({**VARIANTS, "broken": broken})
    moved = Candidate(broken, broken.default(PROBLEM, CPU))
    monkeypatch.setattr(
        selection, "_moved", lambda near, m, registry: iter([replace(near, candidate=moved, median_us=None)])
    )
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", strict=True), registry=registry)
    near = replace(PROBLEM, m=30)
    ready = d.planner.make_ready(near, CPU, None, None)
    assert ready.selection.origin is Origin.BUCKET and ready.selection.median_us is not None
    assert ready.selection.candidate.variant is not broken and d.counters().fallbacks == 1
    d.close()


def test_what_another_process_tuned_is_served_without_a_restart(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0.02))
    d.run(*ARGUMENTS)
    command = [sys.executable, "-m", "autodispatch", "tune", "24,40,32", "--device", "cpu", "--quiet", "--no-isolate"]
    subprocess.run(command, env={**os.environ, "AUTODISPATCH_DB": str(tmp_path / "t.db")}, check=True, timeout=120)
    wait_for(lambda: origin(d) is Origin.TUNED)
    d.close()


def test_nothing_is_looked_at_again_where_the_settings_say_so(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    d.run(*ARGUMENTS)
    assert not [t for t in threading.enumerate() if t.name == "autodispatch-reload" and t is d.planner._watcher]
    tune(tmp_path / "t.db")
    assert origin(d) is Origin.HEURISTIC
    d.close()


def test_a_store_that_fails_during_a_reload_leaves_all_as_it_was(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0.02))
    d.run(*ARGUMENTS)
    d.layers.user.close()
    time.sleep(0.2)
    assert d.planner._watcher is not None and d.planner._watcher.is_alive()
    d.run(*ARGUMENTS)
    assert origin(d) is Origin.HEURISTIC
    d.close()


def test_the_background_tunes_while_no_call_waits_and_the_winner_is_swapped_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Event()

    class Slow(LocalRunner):
        def load(self, *arguments: Any) -> int:
            began.set()
            assert gate.wait(60)
            return super().load(*arguments)

    monkeypatch.setattr(worker, "runner_for", lambda device: Slow(CpuWorkbench(device)))
    d = Dispatcher(Settings(tmp_path / "t.db", mode="background", reload_s=0))
    results = [d.run(*ARGUMENTS) for _ in range(50)]
    assert began.wait(60)
    results += [d.run(*ARGUMENTS) for _ in range(50)]  # while it tunes
    assert origin(d) is Origin.HEURISTIC
    gate.set()
    wait_for(lambda: origin(d) is Origin.TUNED)
    results.append(d.run(*ARGUMENTS))
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-4, atol=1e-4)
    assert (d.counters().tunings, d.counters().misses) == (1, 1)
    d.close()


def tunings(monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None) -> list[int]:
    """The values of m that are tuned from now on, by a tuning that only stores a decision, when the gate is open."""
    tuned: list[int] = []

    def decide(self: planning.Planner, runner: Any, problem: Problem, layers: Layers) -> None:
        assert gate is None or gate.wait(60)
        tuned.append(problem.m)
        stored.begin(layers.user)
        record = stored.measurement(problem, digest=VARIANTS["cpu_split"].digest)
        layers.user.add_measurement(record)
        layers.user.set_decision(stored.decision(problem, record))

    monkeypatch.setattr(planning.Planner, "_tune_with", decide)
    return tuned


def test_many_values_of_m_cost_one_tuning_per_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tunings(monkeypatch)
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune", reload_s=0))
    for m in range(1, 300):
        d.run(np.ones((m, 32), np.float32), *ARGUMENTS[1:])
    calls = d.counters().calls
    d.close()
    assert tuned == [1, 3, 7, 15, 31, 63, 127, 255]
    assert calls == {"tuned": 8, "bucket": 291}


def test_what_the_background_tuned_for_one_m_serves_those_near_it_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    tuned = tunings(monkeypatch, gate)
    d = Dispatcher(Settings(tmp_path / "t.db", mode="background", reload_s=0))
    for m in (24, 25, 30, 100):
        d.run(np.ones((m, 32), np.float32), *ARGUMENTS[1:])
    gate.set()
    near = replace(PROBLEM, m=30)
    wait_for(lambda: getattr(d.planner.find(near, CPU, None, None), "selection", None).origin is Origin.BUCKET)
    wait_for(lambda: len(tuned) == 2)
    d.close()
    assert tuned == [24, 100]


def test_a_hundred_new_shapes_are_served_untuned_and_recorded(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", record_misses=True))
    for m in range(1, 101):
        a = RNG.standard_normal((m, 32)).astype(np.float32)
        out = d.run(a, *ARGUMENTS[1:])
        gate, up = (a.astype(np.float64) @ b.astype(np.float64) for b in ARGUMENTS[1:])
        np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)
    assert (len(d.layers.user.misses()), d.counters().misses, d.counters().tunings) == (100, 100, 0)
    d.close()


def test_strict_refuses_what_is_not_tuned_and_says_what_differs(tmp_path: Path) -> None:
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", strict=True))
    d.run(*ARGUMENTS)
    d.run(ARGUMENTS[0][:20], *ARGUMENTS[1:])  # a near m was tuned
    with pytest.raises(NotTunedError, match="to tune it: autodispatch tune 2,40,32"):
        d.run(ARGUMENTS[0][:2], *ARGUMENTS[1:])
    d.close()
    elsewhere = replace(CPU, sm_count=999)
    other = Dispatcher(Settings(tmp_path / "t.db", strict=True))
    with pytest.raises(NotTunedError, match=rf"sm_count {CPU.sm_count}\) are not for this"):
        other.warmup([PROBLEM], device=elsewhere)
    other.close()


def test_a_pin_serves_all_calls_that_name_no_candidate(tmp_path: Path) -> None:
    for name in ("cpu_split", "cpu_fused"):
        d = Dispatcher(Settings(tmp_path / "t.db", pin=name))
        selection = d.explain(*ARGUMENTS).selection
        assert (selection.origin, selection.candidate.variant.name) == (Origin.PINNED, name)
        d.run(*ARGUMENTS)
        d.run(*ARGUMENTS, candidate="cpu_fused")
        assert d.counters().calls == {"pinned": 2}
        d.close()
    with pytest.raises(ValueError, match="AUTODISPATCH_PIN must be"):
        Dispatcher(Settings(tmp_path / "t.db", pin="unknown")).run(*ARGUMENTS)


def test_a_bound_on_the_error_picks_the_fastest_that_kept_it(tmp_path: Path) -> None:
    tune(tmp_path / "t.db")
    store = TuningStore(tmp_path / "t.db")
    decision = store.decision(CPU.key, PROBLEM)
    assert decision is not None
    by_time = [store.measurement(i) for i in decision.finalists]
    leader, other = by_time[0], by_time[1]
    assert leader is not None and other is not None
    store.write(lambda db: db.execute("UPDATE measurements SET max_error = 0.5"))
    store.write(lambda db: db.execute("UPDATE measurements SET max_error = 1e-4 WHERE id = ?", [other.id]))
    store.close()
    d = Dispatcher(Settings(tmp_path / "t.db"))
    assert d.explain(*ARGUMENTS).selection.candidate.key == (leader.variant, leader.config)
    bound = d.explain(*ARGUMENTS, max_error=1e-3).selection
    assert bound.candidate.key == (other.variant, other.config)
    assert "keeps the error" in bound.reason
    d.run(*ARGUMENTS, max_error=1e-3)
    with pytest.raises(UnsupportedProblemError, match=r"max_error 1e-05.*autodispatch tune"):
        d.run(*ARGUMENTS, max_error=1e-5)
    with pytest.raises(UnsupportedProblemError, match="max_error"):
        d.run(ARGUMENTS[0][:2], *ARGUMENTS[1:], max_error=1e-3)
    d.close()


def test_warmup_makes_the_first_call_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autodispatch import planning

    d = Dispatcher(Settings(tmp_path / "t.db"))
    (selection,) = d.warmup([PROBLEM], device=CPU)
    assert selection.problem == PROBLEM

    def never(*_: object) -> None:
        raise AssertionError("nothing is to be selected any more")

    monkeypatch.setattr(planning, "selections", never)
    d.run(*ARGUMENTS)
    d.close()


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_a_tuning_within_a_call_makes_the_effort_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effort: str
) -> None:
    made: list[str] = []
    whole = Tuner.tune

    def spied(self: Tuner, problem: Problem, **options: Any) -> Any:
        made.append(options["effort"])
        return whole(self, problem, **options)

    monkeypatch.setattr(Tuner, "tune", spied)
    variables = {"DB": str(tmp_path / "t.db"), "MODE": "tune", "EFFORT": effort}
    d = Dispatcher(Settings.from_environment({f"AUTODISPATCH_{k}": v for k, v in variables.items()}))
    d.run(*ARGUMENTS)
    d.close()
    assert made == [effort]


def test_what_a_read_only_database_of_the_settings_holds_is_served_and_not_written(tmp_path: Path) -> None:
    tune(tmp_path / "other.db")
    before = (tmp_path / "other.db").read_bytes()
    variables = {"DB": str(tmp_path / "t.db"), "DB_PATH": str(tmp_path / "other.db"), "RECORD_MISSES": "1"}
    d = Dispatcher(Settings.from_environment({f"AUTODISPATCH_{k}": v for k, v in variables.items()}))
    d.run(*ARGUMENTS)
    found = d.explain(*ARGUMENTS).selection
    d.run(ARGUMENTS[0][:3], *ARGUMENTS[1:])
    d.close()
    assert (found.origin, found.layer) == (Origin.TUNED, str(tmp_path / "other.db"))
    assert (tmp_path / "other.db").read_bytes() == before
    assert TuningStore(tmp_path / "t.db").misses()[0]["m"] == 3
