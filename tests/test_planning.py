"""What happens beside the calls: reloads, tuning in the background, pins, strictness, bounds on the error, counters."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
        selection, "_moved", lambda near, decision, registry: iter([replace(near, candidate=moved, median_us=None)])
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


def decided(monkeypatch: pytest.MonkeyPatch, gate: threading.Event | None = None) -> list[int]:
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
    tuned = decided(monkeypatch)
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
    tuned = decided(monkeypatch, gate)
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


def test_compiles_count_the_kernels_that_a_first_call_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = 0
    whole = Candidate.executable

    def building(self: Candidate, *arguments: Any) -> Any:
        nonlocal kernels
        kernels += 2
        return whole(self, *arguments)

    monkeypatch.setattr(planning, "number_of_kernels", lambda: kernels)
    monkeypatch.setattr(Candidate, "executable", building)
    d = Dispatcher(Settings(tmp_path / "t.db"))
    for _ in range(3):
        d.run(*ARGUMENTS)
    assert d.counters().compiles == 2
    d.close()


def test_counters_tell_copies_misses_and_calls(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db"))
    a, b1, b2 = ARGUMENTS
    for _ in range(3):
        d.run(a[::-1], b1, b2)
    found = d.counters()
    assert (found.copies, found.misses, sum(found.calls.values())) == (3, 1, 3)
    d.close()
    assert sum(d.counters().calls.values()) == 0


def test_prometheus_collects_the_counters(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from autodispatch import prometheus

    d = Dispatcher(Settings(tmp_path / "t.db"))
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(d, registry)
    for _ in range(4):
        d.run(*ARGUMENTS)
    assert registry.get_sample_value("autodispatch_calls_total", {"origin": "heuristic"}) == 4
    assert registry.get_sample_value("autodispatch_misses_total") == 1
    d.close()


FORKED = """
import os, sys, threading
import numpy as np
from pathlib import Path
from autodispatch import Dispatcher, Settings

d = Dispatcher(Settings(Path(sys.argv[1])))
arrays = [np.ones(s, np.float32) for s in ((24, 32), (32, 40), (32, 40))]
d.run(*arrays)
d._lock.acquire()  # as by another thread in the moment of the fork
child = os.fork()
if child == 0:
    same = bool((d.run(*arrays) == d.run(*arrays, candidate="cpu_split")).all())
    os._exit(0 if same else 1)
d._lock.release()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_process_begins_anew_and_does_not_hang(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "t.db")]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_process_forked_from_one_that_used_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from autodispatch import device
    from autodispatch.errors import DeviceError

    monkeypatch.setattr(device, "_is_forked", True)
    with pytest.raises(DeviceError, match="'spawn'"):
        device.cuda_device(0)
    with pytest.raises(DeviceError, match="'spawn'"):
        device.default_device()  # and not the CPU, silently


@pytest.mark.parametrize("is_child", [False, True])
def test_a_child_of_a_process_that_used_cuda_otherwise_says_so_too(
    monkeypatch: pytest.MonkeyPatch, is_child: bool
) -> None:
    from autodispatch import device
    from autodispatch.errors import DeviceError

    class NotInitializedError(RuntimeError):
        status = 3

    def call(*_: int) -> None:
        raise NotInitializedError("cudaErrorInitializationError: initialization error")

    runtime = SimpleNamespace(getDeviceCount=call, getDeviceProperties=call)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(device, "import_cupy", lambda: cupy)
    monkeypatch.setattr(device, "_is_child", is_child)
    for use in (device.default_device, lambda: device.cuda_device(7)):
        with (
            contextlib.nullcontext()
            if use is device.default_device and not is_child
            else pytest.raises(DeviceError, match="'spawn'" if is_child else "must be usable")
        ):
            assert use() == CPU


def test_one_line_per_new_key_is_logged_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db"))
    with caplog.at_level(logging.DEBUG, "autodispatch"):
        for _ in range(3):
            d.run(*ARGUMENTS)
    lines = [r for r in caplog.records if r.levelno == logging.DEBUG and "24,40,32 float32 kn on" in r.getMessage()]
    assert len(lines) == 1
    d.close()


@pytest.mark.parametrize(("level", "heard"), [("debug", True), ("error", False)])
def test_the_log_setting_writes_lines_to_standard_error(tmp_path: Path, level: str, heard: bool) -> None:
    code = "import numpy as np; from autodispatch import run; x = np.ones((4, 4), np.float32); run(x, x, x)"
    env = {**os.environ, "AUTODISPATCH_LOG": level, "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ("autodispatch DEBUG 4,4,4 float32 kn on" in result.stderr) is heard
    assert ("is not tuned on" in result.stderr) is heard
