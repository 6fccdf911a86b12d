"""Tuner: enumerate, compile, check, screen, finals, decide, and store each result when it is there."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from autodispatch import benchmark, heuristics
from autodispatch.benchmark import Timing, Trial, Workbench
from autodispatch.device import environment
from autodispatch.errors import AutodispatchError, CompileError, DeviceError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.records import (
    PROTOCOL_VERSION,
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
    now,
    problem_fields,
)
from autodispatch.reference import Check
from autodispatch.store import TuningStore
from autodispatch.variants import Candidate, Executable, Registry

_log = logging.getLogger("autodispatch")
_QUICK_PER_PATH = 14
_QUICK_PER_TILE = 3  # of those


@dataclass(frozen=True)
class Progress:
    """What a listener is told: `done` of `total` steps of a problem, and what was found last."""

    problem: Problem
    stage: str
    done: int
    total: int
    candidate: Candidate | None = None
    record: MeasurementRecord | None = None


@dataclass(frozen=True)
class Result:
    """A candidate after checking and timing. `timing` is None where it failed."""

    candidate: Candidate
    check: Check
    executable: Executable | None = None
    timing: Timing | None = None
    trial: Trial | None = None
    record: MeasurementRecord | None = None


class Tuner:
    """Tunes problems on one device into one store.

    The workbench says how candidates are run; tests give one with a false clock.
    """

    def __init__(
        self,
        store: TuningStore,
        bench: Workbench,
        registry: Registry | None = None,
        *,
        command: str = "",
        listener: Callable[[Progress], None] | None = None,
    ) -> None:
        self._store = store
        self._bench = bench
        self._device = bench.device
        self._registry = registry or Registry()
        self._command = command
        self._listener = listener or (lambda progress: None)
        self._session: str | None = None

    def tune(self, problem: Problem, *, effort: str = "quick", budget_s: float | None = None) -> DecisionRecord:
        """Measures the candidates of a problem, stores every measurement as it is made, and stores the decision.

        `effort` "quick" tries the defaults and the likely winners of each path, "full" everything legal. When
        `budget_s` seconds are over no further candidate is begun, and the finals are played between those measured.

        Raises UnsupportedProblemError for a problem without work, AutodispatchError if no candidate was right.
        """
        if 0 in (problem.m, problem.n, problem.k):
            raise UnsupportedProblemError(f"m, n and k must be positive to be tuned (got {problem})")
        self._bench.require()
        deadline = None if budget_s is None else time.monotonic() + budget_s
        candidates = self.shortlist(problem, effort)
        try:
            self._load(problem)
            results = self._screen(problem, candidates, deadline)
            good = [r for r in results if r.timing is not None]
            if not good:
                reasons = "; ".join(f"{r.candidate}: {r.check.status} {r.check.reason}" for r in results[:5])
                raise AutodispatchError(
                    f"some candidate must be right for {problem} (got none of {len(results)}: {reasons})"
                )
            return self._finals(problem, self._finalists(problem, good))
        finally:
            self._bench.unload()

    def survey(self, problem: Problem, candidates: Sequence[Candidate] | None = None, rounds: int = 10) -> list[Result]:
        """Times candidates against each other in interleaved rounds without deciding; fastest first, failures last."""
        self._bench.require()
        try:
            self._load(problem)
            results = self._screen(problem, candidates or self.shortlist(problem, "quick"), None)
            good = [r for r in results if r.timing is not None and r.trial is not None]
            self._bench.heat_up()
            timings = benchmark.finals([r.trial for r in good if r.trial is not None], rounds)
            timed = [self._result(problem, r, t, "final") for r, t in zip(good, timings, strict=True)]
            failed = [r for r in results if r.timing is None]
            return sorted(timed, key=lambda r: r.timing.median if r.timing else 0.0) + failed
        finally:
            self._bench.unload()

    def _load(self, problem: Problem) -> None:
        try:
            self._bench.load(problem)
        except MemoryError as cause:
            raise AutodispatchError(
                f"the inputs and the reference of {problem} must fit into memory ({cause})"
            ) from cause

    def shortlist(self, problem: Problem, effort: str) -> list[Candidate]:
        """The candidates to try, likely winners first: always each variant's default and the library."""
        ranked = heuristics.rank(self._registry.candidates(problem, self._device), problem, self._device)
        if effort == "full":
            return ranked
        defaults = self._registry.defaults(problem, self._device)
        kept = set(defaults)
        chosen: Counter[tuple[object, ...]] = Counter()
        for candidate in ranked:
            path = (candidate.variant.path,)
            tunables = vars(candidate.config)
            tile = (candidate.variant.name, tunables.get("tile_m"), tunables.get("tile_n", candidate.config))
            if chosen[path] < _QUICK_PER_PATH and chosen[tile] < _QUICK_PER_TILE:
                chosen.update((path, tile))
                kept.add(candidate)
        return [c for c in ranked if c in kept]

    def _screen(self, problem: Problem, candidates: Sequence[Candidate], deadline: float | None) -> list[Result]:
        results: list[Result] = []
        best: float | None = None
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            builds = [pool.submit(c.executable, problem, self._device) for c in candidates]
            try:
                for i, (candidate, build) in enumerate(zip(candidates, builds, strict=True)):
                    if deadline is not None and time.monotonic() > deadline and any(r.timing for r in results):
                        _log.info("the budget is used up after %d of %d candidates", i, len(candidates))
                        break
                    self._listener(Progress(problem, "screen", i, len(candidates), candidate))
                    result = self._try(problem, candidate, build.result, best)
                    if result.timing is not None:
                        best = min(best or result.timing.median, result.timing.median)
                    results.append(result)
                    self._listener(Progress(problem, "screen", i + 1, len(candidates), candidate, result.record))
            finally:
                for build in builds:
                    build.cancel()
        return results

    def _try(
        self, problem: Problem, candidate: Candidate, build: Callable[[], Executable], best: float | None
    ) -> Result:
        """Compiles, checks and screens one candidate and stores how it went, whatever happens to it."""
        try:
            executable = build()
        except (CompileError, UnsupportedProblemError) as cause:
            status = "compile_failed" if isinstance(cause, CompileError) else "launch_failed"
            return self._result(problem, Result(candidate, Check(status, str(cause))), None, "screen")
        check, timing, trial = Check("launch_failed"), None, None
        try:
            check = self._bench.check(executable)
            if check.status == "ok":
                self._bench.heat_up()
                trial = self._bench.trial(executable)
                timing = benchmark.screen(trial, best)
        except MemoryError as cause:
            check = Check("out_of_memory", str(cause))
        except Exception as cause:
            if not self._bench.healthy():
                raise DeviceError(
                    f"the device must survive every candidate (got {type(cause).__name__} in {candidate}: {cause}); "
                    "this process cannot use it any more"
                ) from cause
            check = Check("launch_failed", f"{type(cause).__name__}: {cause}")
        if check.status != "ok":
            timing = trial = None
        return self._result(problem, Result(candidate, check, executable, trial=trial), timing, "screen")

    def _result(self, problem: Problem, result: Result, timing: Timing | None, stage: str) -> Result:
        """Stores a measurement and returns the result with it."""
        reading = self._bench.reading()
        executable = result.executable
        resources = executable.resources if executable else None
        record = MeasurementRecord.of(
            session_id=self._begin_session(),
            device_key=self._device.key,
            **problem_fields(problem),
            regime=self._bench.regime,
            stage=stage,
            variant=result.candidate.variant.name,
            config=result.candidate.config.to_json(),
            digest=result.candidate.variant.digest,
            status=result.check.status,
            reason=result.check.reason[:4000],
            median_us=round(timing.median, 4) if timing else None,
            p20_us=round(timing.percentile(20), 4) if timing else None,
            p80_us=round(timing.percentile(80), 4) if timing else None,
            mad_us=round(timing.mad, 4) if timing else None,
            samples_us=[round(s, 3) for s in timing.samples] if timing else [],
            relative_error=result.check.relative_error,
            max_error=result.check.max_error,
            registers=resources.registers if resources else None,
            spill_bytes=resources.spill_bytes if resources else None,
            shared_bytes=executable.shared_bytes if executable else None,
            workspace_bytes=executable.workspace_bytes if executable else 0,
            clock_mhz=reading.sm_clock_mhz if reading else None,
            temperature_c=reading.temperature_c if reading else None,
            measured_at=now(),
        )
        self._store.add_measurement(record)
        return Result(result.candidate, result.check, executable, timing, result.trial, record)

    def _finalists(self, problem: Problem, good: list[Result]) -> list[Result]:
        """Those near the best, the best of each path, and the library."""

        def median(result: Result) -> float:
            assert result.timing is not None
            return result.timing.median

        ordered = sorted(good, key=median)
        best = ordered[0]
        assert best.timing is not None
        limit = best.timing.median + max(benchmark.FINAL_MARGIN * best.timing.median, 3 * best.timing.mad)
        finalists = [r for r in ordered if median(r) <= limit][: benchmark.MAX_FINALISTS]
        for path in sorted({r.candidate.variant.path for r in good}):
            finalists.append(next(r for r in ordered if r.candidate.variant.path == path))
        finalists += [r for r in ordered if r.candidate == self._registry.library(problem, self._device)]
        return list({r.candidate: r for r in finalists}.values())

    def _finals(self, problem: Problem, finalists: list[Result]) -> DecisionRecord:
        trials = []
        for result in finalists:
            assert result.trial is not None
            trials.append(result.trial)
        self._listener(Progress(problem, "finals", 0, 1))
        self._bench.heat_up()
        timings = benchmark.finals(trials)
        results = [self._result(problem, r, t, "final") for r, t in zip(finalists, timings, strict=True)]
        records = [r.record for r in results if r.record is not None]
        records.sort(key=lambda r: (r.median_us, r.variant, r.config))
        decision = DecisionRecord(
            device_key=self._device.key,
            **problem_fields(problem),
            regime=self._bench.regime,
            leader=records[0].id,
            finalists=[r.id for r in records],
            session_id=self._begin_session(),
            decided_at=now(),
        )
        self._store.set_decision(decision)
        leader = next(r for r in results if r.record is records[0])
        self._listener(Progress(problem, "finals", 1, 1, leader.candidate, leader.record))
        return decision

    def _begin_session(self) -> str:
        if self._session is None:
            versions = EnvironmentRecord.of(environment(self._device))
            session = SessionRecord(
                id=uuid.uuid4().hex,
                device_key=self._device.key,
                environment_id=versions.id,
                started_at=now(),
                host=socket.gethostname(),
                command=self._command[:2000],
                protocol_version=PROTOCOL_VERSION,
            )
            self._store.begin_session(DeviceRecord.of(self._device), versions, session)
            self._session = session.id
        return self._session
