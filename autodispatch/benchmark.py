"""The timing protocol: a workbench per kind of device, screening and finals. docs/benchmarking.md gives the reasons."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autodispatch import cublas, nvml, reference
from autodispatch.arrays import CupyFamily, Stream, family_of
from autodispatch.compiler import check_architecture
from autodispatch.device import DeviceInfo, import_cupy, on_device
from autodispatch.problem import Operands, Problem
from autodispatch.reference import Check, Checker
from autodispatch.variants.base import Call, Executable

HEAT_UP_S = 0.2
PAUSE_S = 1.0
WARM_UP_S = 0.03  # rests included, as below
UNIT_S = 0.001
SAMPLING_S = 0.04
MIN_SAMPLES, MAX_SAMPLES = 10, 200
GIVE_UP = 1.5  # times the best so far
GIVE_UP_WARM = 1.2
MAX_REST_S = 0.02
FINAL_ROUNDS = 30
MIN_FINALISTS, MAX_FINALISTS = 4, 8  # the fastest of the screening
FINAL_MARGIN = 0.05
THROTTLED = 0.75  # of the first round's clock
THROTTLE_REST_S, MAX_DROPPED_ROUNDS = 0.1, 5
MIN_COPIES, MAX_COPIES = 4, 16
_MAX_LAUNCHES = 1000
_GUARD_BYTES = 512  # on both sides of the workspace
_BUSY = 5  # percent, from where on the device is not ours alone
_LOOK_EVERY_S = 30.0


@dataclass(frozen=True)
class Timing:
    """Samples of one candidate, microseconds per launch."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def mad(self) -> float:
        """The median absolute deviation from the median."""
        middle = self.median
        return statistics.median(abs(s - middle) for s in self.samples)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples, percent))


Trial = Callable[[], float]  # one timed unit: microseconds per launch


class Workbench(ABC):
    """Where candidates are checked and timed: one device, one problem at a time.

    Attributes:
        regime: how launches are timed, `graph` or `eager`, and what the cache holds, `cold` or `warm`.
    """

    device: DeviceInfo
    regime: str
    _checker: Checker | None = None

    def __init__(self, device: DeviceInfo) -> None:
        self.device = device
        self._others: dict[Problem, Checker] = {}

    @abstractmethod
    def load(self, problem: Problem, copies: int | None = None) -> None:
        """Makes the inputs and the reference of a problem; those of the last one are dropped.

        `copies` of the arguments are made to time on, by default as many as the regime needs.
        """

    @abstractmethod
    def unload(self) -> None:
        """Drops the inputs and gives the memory back."""

    @abstractmethod
    def check(self, executable: Executable, problem: Problem | None = None) -> Check:
        """Runs a candidate on poisoned, guarded output and compares it with the reference.

        `problem` is what the executable was made for where that is not the loaded one.
        """

    def _checker_of(self, problem: Problem | None) -> Checker:
        """The checker of the loaded problem, or of another, which is kept until the loaded one is dropped."""
        assert self._checker is not None
        if problem is None:
            return self._checker
        if problem not in self._others:
            self._others[problem] = Checker(problem, self.device)
        return self._others[problem]

    def result(self) -> Any:
        """What the last check left in the output, as float64 on the host."""
        assert self._checker is not None
        return self._checker.result()

    @abstractmethod
    def trial(self, executable: Executable) -> Trial:
        """Makes a candidate ready to be timed."""

    def require(self) -> None:
        """Raises the error that every candidate would meet, before anything is measured or stored."""
        return

    def healthy(self) -> bool:
        """Whether the device can still be used after a candidate failed."""
        return True

    def heat_up(self) -> None:
        """Brings the device to its working clock, after a pause or at the start."""
        return

    def foreign_load(self) -> int:
        """How busy others keep the device, in percent; 0 where that is not known."""
        return 0

    def reading(self) -> nvml.Reading | None:
        return None


class CpuWorkbench(Workbench):
    """Times on the processor with the wall clock, on rotating copies of the arguments."""

    regime = "eager-cold"
    _COPIES = 3

    def __init__(self, device: DeviceInfo) -> None:
        super().__init__(device)
        self._copies: list[Operands] = []

    def load(self, problem: Problem, copies: int | None = None) -> None:
        self._checker = Checker(problem, self.device)
        self._copies = []
        for seed in range(self._COPIES if copies is None else copies):
            inputs = reference.make_inputs(problem, self.device, seed + 2)
            out = np.empty((problem.m, problem.n), inputs.a.dtype)
            self._copies.append(reference.bind(self._checker.family, inputs, out))

    def unload(self) -> None:
        self._checker, self._copies = None, []
        self._others.clear()

    def check(self, executable: Executable, problem: Problem | None = None) -> Check:
        checker = self._checker_of(problem)
        checker.poison()
        executable(Call(checker.operands, 0, None))
        return checker.verdict()

    def trial(self, executable: Executable) -> Trial:
        calls = [Call(operands, 0, None) for operands in self._copies]

        def run(launches: int) -> float:
            start = time.perf_counter()
            for i in range(launches):
                executable(calls[i % len(calls)])
            return (time.perf_counter() - start) / launches

        launches = min(_MAX_LAUNCHES, max(1, int(UNIT_S / max(run(1), 1e-7))))
        return lambda: run(launches) * 1e6


class CudaWorkbench(Workbench):
    """Times on a GPU: launches captured into a CUDA graph of at least 1 ms, events around it, the L2 cache cold because
    the launches rotate through copies of the arguments that together exceed it."""

    regime = "graph-cold"

    def __init__(self, device: DeviceInfo) -> None:
        super().__init__(device)
        self._cupy = import_cupy()
        self._nvml = nvml.Nvml(device.uuid)
        with on_device(device.index):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._handle = Stream(self._stream.ptr)
        self._copies: list[Operands] = []
        self._last_work = 0.0
        self._foreign, self._looked = 0, float("-inf")
        self._scratch: Any = None

    def require(self) -> None:
        check_architecture(self.device, self._cupy.cuda.nvrtc.getSupportedArchs())

    def healthy(self) -> bool:
        try:
            with on_device(self.device.index), self._stream:
                self._cupy.zeros(1, np.uint8).fill(1)
                self._stream.synchronize()
        except Exception:
            return False
        return True

    def load(self, problem: Problem, copies: int | None = None) -> None:
        self.unload()
        with on_device(self.device.index), self._stream:
            self._checker = Checker(problem, self.device)
            for i in range(self._number_of_copies(problem) if copies is None else copies):
                inputs = reference.make_inputs(problem, self.device, i + 2)
                out = reference.GuardedOutput(self._cupy, problem)
                self._copies.append(reference.bind(self._checker.family, inputs, out.array))
            self._stream.synchronize()

    def _number_of_copies(self, problem: Problem) -> int:
        wanted = int(-(-5 * self.device.l2_bytes // max(problem.bytes_moved, 1))) + 1
        free = self._cupy.cuda.runtime.memGetInfo()[0] // 2
        return int(max(1, min(MAX_COPIES, max(MIN_COPIES, wanted), free // max(problem.bytes_moved, 1))))

    def unload(self) -> None:
        self._checker, self._copies, self._scratch = None, [], None
        self._others.clear()
        with on_device(self.device.index):
            self._cupy.get_default_memory_pool().free_all_blocks(stream=self._stream)

    def check(self, executable: Executable, problem: Problem | None = None) -> Check:
        with on_device(self.device.index), self._stream:
            checker = self._checker_of(problem)
            executable.prepare()
            scratch = self._workspace(executable)
            scratch.fill(0xFF)  # nobody inherits another candidate's products
            checker.poison()
            executable(Call(checker.operands, scratch.data.ptr + _GUARD_BYTES, self._handle))
            self._stream.synchronize()
            behind = _GUARD_BYTES + executable.workspace_bytes
            for guard in (scratch[:_GUARD_BYTES], scratch[behind : behind + _GUARD_BYTES]):
                if not bool((guard.get() == 0xFF).all()):
                    return Check("out_of_bounds", "bytes around the workspace were written")
            return checker.verdict()

    def _workspace(self, executable: Executable) -> Any:
        """Scratch memory between guards, for all candidates of a problem; graphs keep what they were captured with."""
        nbytes = executable.workspace_bytes + 2 * _GUARD_BYTES
        if self._scratch is None or self._scratch.size < nbytes:
            self._scratch = self._cupy.empty(nbytes, np.uint8)
        return self._scratch

    def trial(self, executable: Executable) -> Trial:
        assert self._checker is not None
        with on_device(self.device.index), self._stream:
            executable.prepare()
            memory = self._workspace(executable)
            workspace = memory.data.ptr + _GUARD_BYTES
            calls = [Call(operands, workspace, self._handle) for operands in self._copies]
            graph = self._graph(executable, calls, 5)
            estimate = self._seconds(graph, 5)
            launches = int(min(_MAX_LAUNCHES, max(UNIT_S / max(estimate, 1e-7), len(calls))))
            graph = self._graph(executable, calls, launches)
        kept = (graph, memory)  # the graph reads and writes this memory

        def sample() -> float:
            with on_device(self.device.index):
                seconds = self._seconds(kept[0], launches)
            time.sleep(min(seconds * launches, MAX_REST_S))
            return seconds * 1e6

        return sample

    def _graph(self, executable: Executable, calls: Sequence[Call], launches: int) -> Any:
        self._stream.begin_capture()
        try:
            for i in range(launches):
                executable(calls[i % len(calls)])
        except BaseException:
            with contextlib.suppress(Exception):  # the capture is spoiled; what spoiled it is what to report
                self._stream.end_capture()
            raise
        return self._stream.end_capture()

    def _seconds(self, graph: Any, launches: int) -> float:
        event = self._cupy.cuda.Event
        start, end = event(), event()
        start.record(self._stream)
        graph.launch(self._stream)
        end.record(self._stream)
        end.synchronize()
        self._last_work = time.monotonic()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3 / launches

    def heat_up(self) -> None:
        if time.monotonic() - self._last_work < PAUSE_S:
            return
        size = 2048
        with on_device(self.device.index), self._stream:
            rng = self._cupy.random.default_rng(0)
            family = family_of(rng.standard_normal(1, dtype=np.float32))
            assert isinstance(family, CupyFamily)
            x = family.matrix("x", rng.standard_normal((size, size), dtype=np.float32))
            y = self._cupy.empty((size, size), np.float32)
            scratch = self._cupy.cuda.alloc(cublas.workspace_bytes(self.device))
            end = time.monotonic() + HEAT_UP_S
            while time.monotonic() < end:
                for _ in range(4):
                    cublas.product(
                        self.device, self._handle.ptr, scratch.ptr, x, x, "kn", y.data.ptr, "float32", size, tf32=True
                    )
                self._stream.synchronize()
        self._last_work = time.monotonic()

    def foreign_load(self) -> int:
        """What NVML counts over a second in which this process does nothing; counted again after 30 s, and as long as
        others are found."""
        if self._foreign or time.monotonic() - self._looked > _LOOK_EVERY_S:
            time.sleep(max(0.0, self._last_work + PAUSE_S - time.monotonic()))
            busy = self._nvml.busy_percent() or 0
            if busy > _BUSY:  # a neighbour, or what just ended?
                time.sleep(PAUSE_S)
                busy = self._nvml.busy_percent() or 0
            self._foreign = busy if busy > _BUSY else 0
            self._looked = time.monotonic()
        return self._foreign

    def reading(self) -> nvml.Reading | None:
        return self._nvml.read()


def workbench(device: DeviceInfo) -> Workbench:
    """The workbench for a device."""
    return CpuWorkbench(device) if device.kind == "cpu" else CudaWorkbench(device)


def regime(device: DeviceInfo) -> str:
    """How a device's workbench times; see Workbench."""
    return CpuWorkbench.regime if device.kind == "cpu" else CudaWorkbench.regime


def screen(trial: Trial, best_us: float | None, deadline: float | None = None) -> Timing:
    """Warms a candidate up and samples it. One that takes GIVE_UP times the best so far is left after two samples, one
    that still takes GIVE_UP_WARM times it when warm is left with those of the warm-up. At the deadline (by
    time.monotonic) every candidate is left with the samples it has."""
    first = tuple(trial() for _ in range(2))
    if is_over(deadline) or (best_us is not None and min(first) > GIVE_UP * best_us):
        return Timing(first)
    start = time.monotonic()
    warm = [trial()]
    while time.monotonic() < start + WARM_UP_S and not is_over(deadline):
        warm.append(trial())
    if is_over(deadline) or (best_us is not None and min(warm) > GIVE_UP_WARM * best_us):
        return Timing(tuple(warm[-MAX_SAMPLES:]))
    turn_s = (time.monotonic() - start) / len(warm)
    wanted = int(min(MAX_SAMPLES, max(MIN_SAMPLES, SAMPLING_S / max(turn_s, 1e-9))))
    samples: list[float] = []
    while len(samples) < wanted and not (samples and is_over(deadline)):
        samples.append(trial())
    return Timing(tuple(samples))


def is_over(deadline: float | None) -> bool:
    """Whether this moment of time.monotonic, which all processes of a machine share, has passed."""
    return deadline is not None and time.monotonic() >= deadline


def finals(
    trials: Sequence[Trial],
    rounds: int = FINAL_ROUNDS,
    rng: random.Random | None = None,
    clock_mhz: Callable[[], int | None] = lambda: None,
    deadline: float | None = None,
) -> list[Timing]:
    """Times all trials in turn, in random order within each round, so that drift meets all of them alike.

    A round that ends at less than 75 % of the first one's clock is dropped and played again after a rest, a few times.
    At the deadline the rounds end, whatever is under way, but for the first.
    """
    rng = rng or random.Random(0)
    samples: list[list[float]] = [[] for _ in trials]
    order = list(range(len(trials)))
    first_clock, dropped = None, 0
    while trials and len(samples[0]) < rounds:
        rng.shuffle(order)
        played = {}
        for i in order:
            if samples[0] and is_over(deadline):
                return [Timing(tuple(s)) for s in samples]
            played[i] = trials[i]()
        clock = clock_mhz()
        first_clock = first_clock or clock
        if clock and first_clock and clock < THROTTLED * first_clock and dropped < MAX_DROPPED_ROUNDS:
            dropped += 1
            time.sleep(THROTTLE_REST_S)
            continue
        for i, sample in played.items():
            samples[i].append(sample)
    return [Timing(tuple(s)) for s in samples]
