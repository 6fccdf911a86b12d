"""Where a tuner's candidates are tried: built, checked and timed. In this process here, in another in worker.py."""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from autodispatch import benchmark, nvml
from autodispatch.benchmark import Timing, Trial, Workbench
from autodispatch.compiler import Resources
from autodispatch.device import DeviceInfo, usable_cores
from autodispatch.errors import CompileError, DeviceError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.reference import Check
from autodispatch.variants import Candidate, Executable

_FASTEST_READ = 0.8  # of the time that the memory's peak bandwidth gives
_BUILD_NICENESS = 10
_SMALL_M, _SMALL_N, _SMALL_K = 197, 296, 200
_FEWER_N = 24


class Spent(NamedTuple):
    """Seconds that went into a candidate: waiting for its build, checking, timing."""

    building: float = 0.0
    checking: float = 0.0
    timing: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a candidate fared. `timing` is None where it failed; the rest is what it used, as far as it came."""

    check: Check
    timing: Timing | None = None
    resources: Resources | None = None
    shared_bytes: int | None = None
    workspace_bytes: int = 0
    reading: nvml.Reading | None = None
    spent: Spent = field(default_factory=Spent)


class Runner(ABC):
    """Tries the candidates of one problem at a time on one device.

    Attributes:
        regime: see Workbench.
    """

    device: DeviceInfo
    regime: str

    @abstractmethod
    def require(self) -> None:
        """Raises the error that every candidate would meet, before anything is measured or stored."""

    @abstractmethod
    def load(self, problem: Problem, candidates: Sequence[Candidate]) -> int:
        """Makes the inputs and the reference of a problem, and begins to build the candidates. Raises MemoryError.

        Returns how busy others keep the device, in percent.
        """

    @abstractmethod
    def screen(self, candidate: Candidate, best_us: float | None, deadline: float | None = None) -> Outcome:
        """Builds, checks and times a candidate; see `benchmark.screen`. Whatever happens to it is in the outcome.

        Raises DeviceError if the device cannot be used any more.
        """

    @abstractmethod
    def finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None = None) -> list[Outcome]:
        """Times candidates that came through the screening against each other: sample i of each is from round i.

        At the deadline the rounds end, with one at least. A candidate that ruins them is in the outcomes as failed.
        """

    @abstractmethod
    def unload(self) -> None:
        """Drops the problem, and builds that have not begun."""

    def close(self) -> None:
        """Ends whatever the runner had started."""
        return


def overhanging(candidate: Candidate, problem: Problem, device: DeviceInfo) -> Problem | None:
    """A small problem like another, with an odd m and an n that tiles do not divide, or one of about its n where a
    candidate needs as many tiles; None if the candidate is legal for none."""
    n, k = _SMALL_N + problem.n % 8, _SMALL_K + problem.k % 8  # as even as the problem's own
    fewer = max(1, problem.m - 1 - problem.m % 2)  # odd
    rows = dict.fromkeys((min(fewer, _SMALL_M), fewer, problem.m))
    smaller = (
        replace(problem, m=m, n=columns, k=depth)
        for columns in dict.fromkeys((n, max(n, problem.n - _FEWER_N), problem.n))
        for depth in (k, problem.k)
        for m in rows
    )
    return next((small for small in smaller if candidate.is_legal(small, device)), None)


def _step_back() -> None:
    """Lets the thread that checks and times go before the calling one."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILD_NICENESS)


class LocalRunner(Runner):
    """Tries candidates in this process, which a candidate can ruin."""

    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.device = bench.device
        self.regime = bench.regime
        self._problem: Problem | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._builds: dict[Candidate, Future[Executable]] = {}
        self._trials: dict[Candidate, Trial] = {}

    def require(self) -> None:
        self.bench.require()

    def load(self, problem: Problem, candidates: Sequence[Candidate]) -> int:
        self.unload()
        self._problem = problem
        foreign_load = self.bench.foreign_load()
        self.bench.load(problem)  # before the builds: what it compiles would wait for theirs
        self._pool = ThreadPoolExecutor(usable_cores(), initializer=_step_back)
        self._builds = {c: self._pool.submit(c.executable, problem, self.device) for c in candidates}
        return foreign_load

    def screen(self, candidate: Candidate, best_us: float | None, deadline: float | None = None) -> Outcome:
        moments = [time.monotonic()]
        outcome = self._screen(candidate, best_us, deadline, moments)
        moments += [time.monotonic()] * (4 - len(moments))
        return replace(outcome, spent=Spent(*(end - start for start, end in pairwise(moments))))

    def _screen(
        self, candidate: Candidate, best_us: float | None, deadline: float | None, moments: list[float]
    ) -> Outcome:
        """As far as it comes; `moments` are told the end of the build and of the first check."""
        try:
            executable = self.build(candidate)
            moments.append(time.monotonic())
        except (CompileError, UnsupportedProblemError) as cause:
            status = "compile_failed" if isinstance(cause, CompileError) else "launch_failed"
            return Outcome(Check(status, str(cause)))
        try:
            check = self._check(candidate, executable)
            moments.append(time.monotonic())
            if check.status == "ok":
                self.bench.heat_up()
                trial = self._trials[candidate] = self.bench.trial(executable)
                timing = benchmark.screen(trial, best_us, deadline)
                check = self._implausible(timing) or self.bench.check(executable)  # once more, after many launches
                return self._outcome(executable, check, timing if check.status == "ok" else None)
        except MemoryError as cause:
            check = Check("out_of_memory", str(cause))
        except Exception as cause:
            if not self.bench.healthy():
                raise DeviceError(
                    f"the device must survive every candidate (got {type(cause).__name__} in {candidate}: {cause}); "
                    "this process cannot use it any more"
                ) from cause
            check = Check("launch_failed", f"{type(cause).__name__}: {cause}")
        return self._outcome(executable, check, None)

    def _check(self, candidate: Candidate, executable: Executable) -> Check:
        """On the problem, and beside it on a small one over which tiles hang in both directions."""
        assert self._problem is not None
        check = self.bench.check(executable)
        beside = overhanging(candidate, self._problem, self.device)
        if check.status != "ok" or beside is None:
            return check
        other = self.bench.check(candidate.executable(beside, self.device), beside)
        return check if other.status == "ok" else replace(other, reason=f"on {beside}: {other.reason}")

    def finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None = None) -> list[Outcome]:
        for candidate in candidates:
            if candidate not in self._trials:  # screened by another process, or in an earlier tuning
                self._trials[candidate] = self.bench.trial(self.build(candidate))
        self.bench.heat_up()
        trials = [self._trials[c] for c in candidates]
        timings = benchmark.finals(trials, rounds, clock_mhz=self._clock_mhz, deadline=deadline)
        return [
            self._outcome(self.build(c), Check("ok"), timing) for c, timing in zip(candidates, timings, strict=True)
        ]

    def _clock_mhz(self) -> int | None:
        reading = self.bench.reading()
        return reading.sm_clock_mhz if reading else None

    def build(self, candidate: Candidate) -> Executable:
        """The candidate's executable, when it is built."""
        if candidate in self._builds:
            return self._builds[candidate].result()
        assert self._problem is not None
        return candidate.executable(self._problem, self.device)

    def _implausible(self, timing: Timing) -> Check | None:
        """A failure where the weights cannot have been read in that time; from L2, where all copies fit, they may."""
        assert self._problem is not None
        nbytes = 2 * self._problem.n * self._problem.k * self._problem.item_bytes
        is_cold = benchmark.MAX_COPIES * nbytes > 2 * self.device.l2_bytes
        least_us = _FASTEST_READ * nbytes / self.device.bandwidth * 1e6 if self.device.bandwidth and is_cold else 0.0
        if timing.median > least_us:
            return None
        reason = f"{timing.median:.3g} us per launch: reading the weights alone takes {least_us:.3g} us"
        return Check("launch_failed", f"{reason}, so that it cannot have run")

    def unload(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._problem is not None:
            self.bench.unload()
        self._pool = self._problem = None
        self._builds, self._trials = {}, {}

    def _outcome(self, executable: Executable, check: Check, timing: Timing | None) -> Outcome:
        used = (executable.resources, executable.shared_bytes, executable.workspace_bytes)
        return Outcome(check, timing, *used, self.bench.reading())
