"""The worker process: what candidates do to it costs them alone, and nothing that was finished is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodispatch.benchmark import CpuWorkbench
from autodispatch.device import cpu_device
from autodispatch.errors import AutodispatchError
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Progress, Tuner
from autodispatch.variants import Registry
from autodispatch.worker import WorkerRunner
from tests.fakes import DEADLY, DIES_IN_THE_FINALS, HANGS_LATER, registry_of

PROBLEM = Problem(64, 64, 64, "float32")
CPU = cpu_device()
LAST = (DIES_IN_THE_FINALS.name,)


@pytest.fixture
def runner() -> Iterator[WorkerRunner]:
    found = WorkerRunner(CPU, "tests.fakes:worker_runner", run_limit_s=1.0)
    yield found
    found.close()
    assert found._process is None


def test_a_crash_a_hang_and_a_ruined_device_cost_the_candidate_alone(runner: WorkerRunner, store: TuningStore) -> None:
    decision = Tuner(store, runner, Registry(registry_of(*DEADLY))).tune(PROBLEM)
    found = {r.variant: r for r in store.measurements() if r.stage == "screen"}
    assert {name: r.status for name, r in found.items()} == {
        "segfaults": "crashed",
        "exits": "crashed",
        "hangs": "timeout",
        "ruins": "launch_failed",
        "good": "ok",
        "slower": "ok",
    }
    assert "SIGSEGV" in found["segfaults"].reason
    assert "exit code 7" in found["exits"].reason
    assert "over 1" in found["hangs"].reason
    assert "illegal memory access" in found["ruins"].reason
    leader = store.measurement(decision.leader)
    assert leader is not None
    assert leader.variant == "good"


def test_a_crash_in_the_finals_costs_the_candidate_alone(runner: WorkerRunner, store: TuningStore) -> None:
    chosen = Registry({v.name: v for v in (*DEADLY, DIES_IN_THE_FINALS) if v.name in ("good", "slower", *LAST)})
    decision = Tuner(store, runner, chosen).tune(PROBLEM)
    assert decision.complete
    latest = {r.variant: r for r in sorted(store.measurements(), key=lambda r: r.measured_at)}
    assert {name: r.status for name, r in latest.items()} == {LAST[0]: "crashed", "good": "ok", "slower": "ok"}
    assert "in the finals" in latest[LAST[0]].reason and "SIGSEGV" in latest[LAST[0]].reason
    leader = store.measurement(decision.leader)
    assert leader is not None and leader.variant == "good"
    tried: list[str] = []
    Tuner(store, runner, chosen, listener=lambda p: tried.append(f"{p.stage} {p.candidate}")).tune(PROBLEM)
    assert sum(LAST[0] in step for step in tried) == 1  # as what is known of it


def test_a_worker_that_cannot_take_up_the_problem_is_no_candidates_fault(
    runner: WorkerRunner, store: TuningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Registry({v.name: v for v in (*DEADLY, DIES_IN_THE_FINALS) if v.name in ("good", "slower", *LAST)})
    whole, loads = WorkerRunner._ask, 0

    def without_memory(self: WorkerRunner, request: str, *arguments: object, limit_s: float) -> object:
        nonlocal loads
        loads += request == "load"
        if request == "load" and loads == 2:  # the one after the crash
            whole(self, "unload", limit_s=limit_s)
            raise MemoryError("for a moment")
        return whole(self, request, *arguments, limit_s=limit_s)

    monkeypatch.setattr(WorkerRunner, "_ask", without_memory)
    with pytest.raises(AutodispatchError, match="another worker must have memory"):
        Tuner(store, runner, chosen).tune(PROBLEM)
    assert {r.status for r in store.measurements()} == {"ok"}
    decision = Tuner(store, runner, chosen).tune(PROBLEM)
    leader = store.measurement(decision.leader)
    assert leader is not None and leader.variant == "good" and decision.complete


def test_a_worker_that_was_killed_from_outside_is_replaced(runner: WorkerRunner, store: TuningStore) -> None:
    good = Registry({v.name: v for v in DEADLY if v.name in ("good", "slower")})
    Tuner(store, runner, good).tune(PROBLEM)
    assert runner._process is not None
    os.kill(runner._process.pid, signal.SIGKILL)
    with pytest.raises(AutodispatchError, match="SIGKILL"):
        Tuner(store, runner, good).tune(PROBLEM)
    Tuner(store, runner, good).tune(PROBLEM)
    assert len({r.session_id for r in store.measurements()}) == 2


def test_an_interruption_ends_the_worker_and_keeps_what_was_finished(store: TuningStore) -> None:
    runner = WorkerRunner(CPU, "tests.fakes:worker_runner")
    chosen = [v for v in DEADLY if v.name == "good"] + [HANGS_LATER]

    def interrupt_the_hang(step: Progress) -> None:
        if step.candidate is not None and step.candidate.variant is HANGS_LATER:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Tuner(store, runner, Registry(registry_of(*chosen)), listener=interrupt_the_hang).tune(PROBLEM)
    assert time.monotonic() - start < 20
    assert runner._process is None
    assert {r.variant for r in store.measurements()} == {"good"}


def test_the_real_worker_of_the_cpu_device_finds_what_this_process_finds(store: TuningStore) -> None:
    runner = WorkerRunner(CPU)
    tuner = Tuner(store, runner)
    decision = tuner.tune(PROBLEM, effort="full")
    runner.close()
    assert runner.regime == LocalRunner(CpuWorkbench(CPU)).regime
    record = store.measurement(decision.leader)
    assert record is not None
    assert record.variant in ("cpu_fused", "cpu_split")
    assert record.relative_error is not None
    assert {r.status for r in store.measurements()} == {"ok"}


def test_a_worker_that_cannot_start_says_so(store: TuningStore) -> None:
    runner = WorkerRunner(CPU, "no.such.module:factory")
    with pytest.raises(AutodispatchError, match="exit code 1"):
        Tuner(store, runner).tune(PROBLEM)
    assert sum(store.counts().values()) == 0
    runner.close()


def test_a_runner_that_was_closed_starts_no_other_worker(runner: WorkerRunner, store: TuningStore) -> None:
    good = Registry({v.name: v for v in DEADLY if v.name in ("good", "slower")})
    tuner = Tuner(store, runner, good, listener=lambda step: runner.close())
    with pytest.raises(AutodispatchError, match="the runner is closed"):
        tuner.tune(PROBLEM)
    assert not store.measurements()


def test_a_worker_ends_with_its_parent_even_while_a_candidate_hangs(tmp_path: Path) -> None:
    code = """
import sys
from autodispatch.device import cpu_device
from autodispatch.problem import Problem
from autodispatch.variants import Candidate
from autodispatch.worker import WorkerRunner
from tests.fakes import DEADLY
runner = WorkerRunner(cpu_device(), "tests.fakes:worker_runner")
hangs = next(v for v in DEADLY if v.name == "hangs")
candidate = Candidate(hangs, hangs.default(None, None))
runner.load(Problem(64, 64, 64, "float32"), [candidate])
print(runner._process.pid, flush=True)
runner.screen(candidate, None)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    for _ in range(50):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]:
            return
        time.sleep(0.2)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker lives on")
