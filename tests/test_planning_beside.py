"""What calls, builds, tunings and reloads do to each other when they happen at once, and what is left when they end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodispatch import background, planning, worker
from autodispatch.arrays import NumpyFamily
from autodispatch.benchmark import CpuWorkbench
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import CompileError, NotTunedError, StoreError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate
from autodispatch.variants.cpu import _CpuExecutable
from tests.test_planning import ARGUMENTS, CPU, PROBLEM, origin, tune, wait_for


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_warmup_and_calls_of_new_problems_do_not_wait_for_each_other_for_ever(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0.01))
    b1, b2 = ARGUMENTS[1:]

    def warm() -> None:
        for m in range(2, 300):
            d.warmup([Problem(m, 40, 32, "float32")], device=CPU)

    def call() -> None:
        for m in range(300, 600):
            d.run(np.ones((m, 32), np.float32), b1, b2)

    threads = [in_thread(warm), in_thread(call)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    d.close()


def test_a_ready_call_and_the_counters_do_not_wait_while_another_problem_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"))
    d.run(*ARGUMENTS)
    tuning, gate = threading.Event(), threading.Event()

    def slow(self: Any, problem: Problem, *_: Any) -> None:
        tuning.set()
        assert gate.wait(60)

    monkeypatch.setattr(planning.Planner, "_tune", slow)
    thread = in_thread(lambda: d.run(ARGUMENTS[0][:5], *ARGUMENTS[1:]))
    assert tuning.wait(60)
    done = threading.Event()
    in_thread(lambda: (d.run(*ARGUMENTS), d.run(ARGUMENTS[0].copy(), *ARGUMENTS[1:]), d.counters(), done.set()))
    assert done.wait(30)
    gate.set()
    thread.join(60)
    d.close()


def test_a_tuned_pick_stays_where_the_store_cannot_be_read_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    d.run(*ARGUMENTS)
    assert origin(d) is Origin.TUNED
    whole = TuningStore.decisions

    def failing(self: TuningStore, *arguments: Any) -> Any:
        raise StoreError("as the test says")

    monkeypatch.setattr(TuningStore, "decisions", failing)
    assert d.planner.reload() is False
    assert origin(d) is Origin.TUNED
    monkeypatch.setattr(TuningStore, "decisions", whole)
    assert d.planner.reload() is True
    d.layers.user.close()
    with pytest.raises(StoreError):
        d.planner.reload_if_changed()
    assert origin(d) is Origin.TUNED
    d.close()


def test_what_is_tuned_while_a_problem_is_built_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=60))
    whole = planning.Planner._first_that_builds

    def slow(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(planning.Planner, "_first_that_builds", whole)
        tune(tmp_path / "t.db")
        return whole(self, *arguments)

    monkeypatch.setattr(planning.Planner, "_first_that_builds", slow)
    d.warmup([PROBLEM], device=CPU)
    assert origin(d) is Origin.TUNED
    d.close()


def test_a_background_tuning_that_is_over_before_the_first_build_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "runner_for", lambda device: LocalRunner(CpuWorkbench(device)))
    d = Dispatcher(Settings(tmp_path / "t.db", mode="background", reload_s=0))
    whole = planning.Planner._first_that_builds

    def slow(self: Any, *arguments: Any) -> Any:
        time.sleep(0.5)
        return whole(self, *arguments)

    monkeypatch.setattr(planning.Planner, "_first_that_builds", slow)
    d.run(*ARGUMENTS)
    wait_for(lambda: origin(d) is Origin.TUNED)
    d.close()


def test_the_worker_of_the_background_is_given_up_when_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LocalRunner] = []

    class Runner(LocalRunner):
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(background, "_IDLE_S", 0.05)
    monkeypatch.setattr(worker, "runner_for", lambda device: Runner(CpuWorkbench(device)))
    d = Dispatcher(Settings(tmp_path / "t.db", mode="background", reload_s=0))
    for m in (24, 9):
        d.run(ARGUMENTS[0][:m], *ARGUMENTS[1:])
        wait_for(lambda m=m: d.explain(ARGUMENTS[0][:m], *ARGUMENTS[1:]).selection.origin is Origin.TUNED)  # type: ignore[misc]
        wait_for(lambda: len(closed) > 0)
        wait_for(lambda: d.planner._background is not None and d.planner._background._thread is None)
        closed.clear()
    d.close()


def test_a_dispatcher_that_nobody_has_any_more_leaves_no_thread(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0.02))
    d.run(*ARGUMENTS)
    thread, gone = d.planner._watcher, weakref.ref(d)
    assert thread is not None and thread.is_alive()
    del d
    wait_for(lambda: gc.collect() >= 0 and gone() is None)
    thread.join(30)
    assert not thread.is_alive()


def test_a_tuned_winner_that_does_not_build_is_not_tried_again_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    winner = d.explain(*ARGUMENTS).selection.candidate
    tries = 0
    whole = type(winner.variant).executable

    def failing(self: Any, config: Any, *arguments: Any) -> Any:
        nonlocal tries
        if config == winner.config:
            tries += 1
            raise CompileError("as the test says")
        return whole(self, config, *arguments)

    monkeypatch.setattr(type(winner.variant), "executable", failing)
    d.run(*ARGUMENTS)
    assert tries == 1
    changes: list[int] = []
    d.planner._on_change = lambda: changes.append(1)
    for _ in range(5):
        assert d.planner.reload()
    assert tries == 1 and changes == []
    d.close()


def test_max_error_is_kept_also_without_scratch_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(tmp_path / "t.db")
    store = TuningStore(tmp_path / "t.db")
    store.write(lambda db: db.execute("UPDATE measurements SET max_error = 0.5 WHERE variant <> 'cpu_split'"))
    store.write(lambda db: db.execute("UPDATE measurements SET max_error = 1e-9 WHERE variant = 'cpu_split'"))
    store.close()
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    monkeypatch.setattr(_CpuExecutable, "workspace_bytes", 64)
    monkeypatch.setattr(NumpyFamily, "workspace", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(MemoryError, match="none left"):
        d.run(*ARGUMENTS, max_error=1e-8)
    d.close()


def test_max_error_of_a_problem_that_was_never_tuned_does_what_the_mode_says(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune", reload_s=0))
    d.run(*ARGUMENTS, max_error=1.0)
    assert d.counters().tunings == 1 and d.counters().calls == {"tuned": 1}
    d.close()
    for bad in ("x", -1.0, 0, float("nan")):
        with pytest.raises(ValueError, match="max_error must be a positive number"):
            d.run(*ARGUMENTS, max_error=bad)
    d.close()


@pytest.mark.parametrize("mode", ["cache", "background", "off"])
def test_strict_refuses_in_every_mode_and_counts_a_miss_once(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background.Background, "add", lambda *_: None)
    d = Dispatcher(Settings(tmp_path / "t.db", mode=mode, strict=True, record_misses=True, reload_s=0))
    for _ in range(3):
        with pytest.raises(NotTunedError):
            d.run(*ARGUMENTS)
    if mode != "off":
        assert d.counters().misses == 1 and [r["count"] for r in d.layers.user.misses()] == [1]
    d.close()


def test_the_background_tunes_for_a_bound_that_no_near_decision_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "runner_for", lambda device: LocalRunner(CpuWorkbench(device)))
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", mode="background", reload_s=0))
    d.layers.user.write(lambda db: db.execute("UPDATE measurements SET max_error = 0.5"))
    near = np.ones((ARGUMENTS[0].shape[0] + 1, 32), np.float32)
    d.run(near, *ARGUMENTS[1:])  # served by what was tuned for a near m
    with pytest.raises(UnsupportedProblemError, match=r"max_error 0\.1"):
        d.run(near, *ARGUMENTS[1:], max_error=0.1)
    wait_for(lambda: d.counters().tunings == 1)
    wait_for(lambda: d.layers.user.decision(CPU.key, replace(PROBLEM, m=len(near))) is not None)
    d.run(near, *ARGUMENTS[1:], max_error=0.1)
    d.close()


def test_a_problem_whose_near_decision_does_not_build_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune(tmp_path / "t.db")
    store = TuningStore(tmp_path / "t.db")
    decision = store.decision(CPU.key, PROBLEM)
    assert decision is not None
    leader = store.measurement(decision.leader)
    store.close()
    assert leader is not None
    whole = Candidate.executable

    def broken(self: Candidate, problem: Problem, device: Any) -> Any:
        if self.key == (leader.variant, leader.config):
            raise CompileError("as the test says")
        return whole(self, problem, device)

    monkeypatch.setattr(Candidate, "executable", broken)
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune", reload_s=0))
    d.run(np.ones((PROBLEM.m + 1, 32), np.float32), *ARGUMENTS[1:])
    assert (d.counters().tunings, d.counters().calls.get("tuned")) == (1, 1)
    d.close()


def test_a_miss_is_counted_also_where_it_is_tuned_at_once(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune", reload_s=0))
    d.run(*ARGUMENTS)
    assert (d.counters().misses, d.counters().tunings) == (1, 1)
    d.close()


def test_max_error_that_nothing_keeps_is_refused_whatever_was_tuned(tmp_path: Path) -> None:
    tune(tmp_path / "t.db")
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    d.run(*ARGUMENTS, max_error=1.0)
    d.layers.user.write(lambda db: db.execute("UPDATE measurements SET max_error = 0.5"))
    assert d.planner.reload()
    with pytest.raises(UnsupportedProblemError, match=r"max_error 0\.1"):
        d.run(*ARGUMENTS, max_error=0.1)
    d.close()
