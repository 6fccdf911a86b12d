"""Planner: which candidate serves a problem, built and loaded; what a miss leads to; and what another process tuned."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autodispatch.compiler import number_of_kernels
from autodispatch.device import DeviceInfo, on_device
from autodispatch.driver import relax_capture_mode
from autodispatch.errors import (
    AutodispatchError,
    CompileError,
    DeviceError,
    LaunchError,
    NotTunedError,
    StoreError,
    UnsupportedProblemError,
)
from autodispatch.layers import Layers
from autodispatch.metrics import Counters
from autodispatch.problem import Problem
from autodispatch.selection import Origin, Selection, near_miss, selections, stored_selections
from autodispatch.settings import Settings
from autodispatch.variants import Candidate, Executable, Registry

if TYPE_CHECKING:
    from autodispatch.runner import Runner
    from autodispatch.tuner import Progress

_log = logging.getLogger("autodispatch")
_Key = tuple[str, int | None, Problem, Candidate | None, float | None]


@dataclass
class Ready:
    """A problem's selection with its executable, which a reload may exchange; `calls` are those that it served."""

    selection: Selection
    executable: Executable
    calls: int = 0


class Planner:
    """Makes problems ready, each once, and keeps them so. May be shared between threads.

    Attributes:
        listener: hears of the steps of a tuning within a call.
    """

    def __init__(
        self, settings: Settings, registry: Registry, layers: Callable[[], Layers], on_change: Callable[[], None]
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.counters = Counters()
        self.listener: Callable[[Progress], None] | None = None
        self._open_layers = layers
        self._on_change = on_change
        self._ready: dict[_Key, Ready] = {}
        self._missed: set[tuple[Any, ...]] = set()
        self._tuned: set[tuple[str, Problem]] = set()
        self._is_tuning = False  # in the thread that holds the lock
        self._served: Counter[str] = Counter()  # calls by what was exchanged since
        self._versions: dict[str, int] = {}
        self._background: _Background | None = None
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        self._lock = threading.RLock()

    @property
    def layers(self) -> Layers | None:
        """The databases to ask; None where the mode is not to ask any."""
        return None if self.settings.mode == "off" else self._open_layers()

    def find(
        self, problem: Problem, device: DeviceInfo, pinned: Candidate | None, max_error: float | None
    ) -> Ready | None:
        """What is ready for a problem; None if nothing is."""
        return self._ready.get((device.key, device.index, problem, pinned, max_error))

    def make_ready(
        self, problem: Problem, device: DeviceInfo, pinned: Candidate | None = None, max_error: float | None = None
    ) -> Ready:
        """Selects and builds, or returns what is ready. Raises what `Dispatcher.run` raises."""
        key = (device.key, device.index, problem, pinned, max_error)
        with self._lock:
            ready = self._ready.get(key)
            if ready is None:
                ready = self._ready[key] = Ready(*self._bind(problem, device, pinned, max_error))
            return ready

    def snapshot(self) -> Counters:
        """The counters as they are now."""
        calls = Counter(self._served)
        for ready in list(self._ready.values()):
            calls[ready.selection.origin.value] += ready.calls
        return replace(self.counters, calls=dict(calls))

    def pinned(self, candidate: Candidate | str | None, problem: Problem, device: DeviceInfo) -> Candidate | None:
        """The candidate that the caller, or AUTODISPATCH_PIN, named. Raises ValueError, UnsupportedProblemError."""
        name = "candidate"
        if candidate is None:
            name, candidate = "AUTODISPATCH_PIN", self.settings.pin
        if candidate is None:
            return None
        if isinstance(candidate, Candidate):
            candidate.check(problem, device)
            return candidate
        if candidate not in self.registry.variants:
            names = ", ".join(self.registry.variants)
            raise ValueError(f"{name} must be a Candidate or one of {names} (got {candidate!r})")
        variant = self.registry.variants[candidate]
        why = variant.unmet(problem, device)
        if why:
            raise UnsupportedProblemError(f"{candidate} requires {'; '.join(why)} (got {problem} on {device.name})")
        return Candidate(variant, variant.default(problem, device))

    def without_workspace(self, selection: Selection, cause: MemoryError) -> Executable:
        """A candidate for a call whose scratch memory could not be had."""
        if selection.origin is Origin.PINNED:
            raise cause
        problem, device = selection.problem, selection.device
        for other in selections(problem, device, self.registry):
            variant, config = other.candidate.variant, other.candidate.config
            if variant.path == "fused" and variant.workspace_bytes(config, problem) == 0:
                _log.warning("no memory for scratch space (%s); %s serves this call", cause, other.candidate)
                self.counters.fallbacks += 1
                return other.candidate.executable(problem, device)
        raise cause

    def close(self) -> None:
        """Ends what runs beside the calls."""
        self._closed.set()
        if self._background is not None:
            self._background.close()

    def _bind(
        self, problem: Problem, device: DeviceInfo, pinned: Candidate | None, max_error: float | None
    ) -> tuple[Selection, Executable]:
        """The first selection that builds. A tuned candidate that does not is passed over with a warning."""
        layers = self.layers
        choices = selections(problem, device, self.registry, layers, pinned, max_error)
        first = next(choices)
        if layers is not None and pinned is None:
            self._watch(layers)
            if self._act_on(first, layers):
                choices = selections(problem, device, self.registry, layers, None, max_error)
                first = next(choices)
        return self._first_that_builds(first, choices)

    def _first_that_builds(self, first: Selection, choices: Iterator[Selection]) -> tuple[Selection, Executable]:
        problem, device = first.problem, first.device
        last: Exception | None = None
        before = number_of_kernels()
        for selection in itertools.chain([first], choices):
            try:
                with on_device(device.index):
                    executable = selection.candidate.executable(problem, device)
                    executable.prepare()
                _log.debug("%s on %s: %s, %s", problem, device.name, selection.candidate, selection.reason)
                self.counters.compiles += number_of_kernels() - before
                return selection, executable
            except (CompileError, LaunchError, UnsupportedProblemError) as cause:
                if selection.origin is Origin.PINNED:
                    raise
                _log.warning("%s is passed over: %s", selection.candidate, cause)
                self.counters.fallbacks += 1
                last = cause
        raise UnsupportedProblemError(f"some candidate must build for {problem} (got none; the last: {last})") from last

    def _act_on(self, selection: Selection, layers: Layers) -> bool:
        """Does what the settings say about a selection that was or was not tuned; True if that was to tune now."""
        problem, device, origin = selection.problem, selection.device, selection.origin
        mode = self.settings.mode
        if mode == "force" or (mode == "tune" and origin is not Origin.TUNED):
            # a candidate that calls run while it is tuned is served untuned: the device is being timed on
            if (device.key, problem) in self._tuned or self._is_tuning:
                return False
            self._tuned.add((device.key, problem))
            self._is_tuning = True
            try:
                self._tune(problem, device, layers)
            finally:
                self._is_tuning = False
            return True
        if origin is Origin.TUNED:
            return False
        self.counters.misses += 1
        if self.settings.record_misses:
            try:
                layers.user.record_miss(device.key, problem)
            except StoreError as cause:
                _log.warning("the miss of %s was not recorded: %s", problem, cause)
        if mode == "background":
            self._tune_later(problem, device, layers)
            return False
        if origin is Origin.BUCKET:
            return False
        advice = f"{problem} is not tuned on {device.name}; to tune it: autodispatch tune {problem.options}"
        if self.settings.strict:
            raise NotTunedError(advice + near_miss(problem, device, self.registry, layers))
        kind = (device.key, problem.n, problem.k, problem.dtype, problem.layout)
        if kind not in self._missed:
            self._missed.add(kind)
            _log.warning("%s", advice)
        return False

    def _tune(self, problem: Problem, device: DeviceInfo, layers: Layers) -> None:
        # imported here, since a call measures only where its user asked for it
        from autodispatch.benchmark import workbench
        from autodispatch.runner import LocalRunner

        self._tune_with(LocalRunner(workbench(device)), problem, layers)

    def _tune_with(self, runner: Runner, problem: Problem, layers: Layers) -> None:
        from autodispatch.tuner import Tuner

        mode, effort = self.settings.mode, self.settings.effort
        tuner = Tuner(layers.user, runner, self.registry, listener=self.listener, command=f"run in mode {mode}")
        self.counters.tunings += 1
        try:
            tuner.tune(problem, effort=effort)
        except DeviceError:
            raise
        except AutodispatchError as cause:
            _log.warning("%s could not be tuned: %s", problem, cause)

    # beside the calls

    def _tune_later(self, problem: Problem, device: DeviceInfo, layers: Layers) -> None:
        if (device.key, problem) in self._tuned:
            return
        self._tuned.add((device.key, problem))
        if self._background is None:
            self._background = _Background()
        self._background.add(lambda runner: self._tune_and_reload(runner, problem, layers), device)

    def _tune_and_reload(self, runner: Runner, problem: Problem, layers: Layers) -> None:
        self._tune_with(runner, problem, layers)
        self.reload(problem)

    def _watch(self, layers: Layers) -> None:
        """Begins to look, every so many seconds, whether another process changed a database."""
        if self._watcher is not None or self.settings.reload_s <= 0:
            return
        self._versions = versions(layers)
        self._watcher = threading.Thread(target=self._look_again, name="autodispatch-reload", daemon=True)
        self._watcher.start()

    def _look_again(self) -> None:
        _stay_out_of_captures()
        while not self._closed.wait(self.settings.reload_s):
            try:
                layers = self.layers
                found = versions(layers) if layers is not None and not self._closed.is_set() else self._versions
                if found != self._versions:
                    self._versions = found
                    self.reload()
            except Exception as cause:  # a database that comes and goes must not end the looking
                _log.debug("no reload: %s", cause)

    def reload(self, problem: Problem | None = None) -> None:
        """Selects anew for what is ready, or for one problem of it, and exchanges what is served otherwise now.

        Whatever must be built is built here, so that no call waits for it.
        """
        changed = False
        for key, ready in list(self._ready.items()):
            _, _, its_problem, pinned, max_error = key
            if pinned is not None or problem not in (None, its_problem):
                continue
            old, layers = ready.selection, self.layers
            device = old.device
            try:
                stored = (
                    stored_selections(its_problem, device, self.registry, layers, max_error)
                    if layers is not None
                    else iter(())
                )
                first = next(stored, None)
                if first is None and old.decision is None:
                    continue  # by the model as before, which need not be asked again
                choices = selections(its_problem, device, self.registry, layers, None, max_error)
                first = next(choices)
                is_same = first.candidate.key == old.candidate.key
                selection, executable = (
                    (first, ready.executable) if is_same else self._first_that_builds(first, choices)
                )
            except AutodispatchError as cause:
                _log.warning("%s is served as before: %s", its_problem, cause)
                continue
            self._served[old.origin.value] += ready.calls
            ready.selection, ready.executable, ready.calls = selection, executable, 0
            if is_same:
                continue
            changed = True
            _log.info("%s on %s: from now on %s, %s", its_problem, device.name, selection.candidate, selection.reason)
        if changed:
            self._on_change()


class _Background:
    """A thread that tunes one problem after the other, each device's candidates in a process of their own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[Runner], None], DeviceInfo] | None] = queue.SimpleQueue()
        self._runners: dict[str, Runner] = {}
        self._thread = threading.Thread(target=self._work, name="autodispatch-tune", daemon=True)
        self._thread.start()

    def add(self, work: Callable[[Runner], None], device: DeviceInfo) -> None:
        self._waiting.put((work, device))

    def close(self) -> None:
        self._waiting.put(None)
        for runner in list(self._runners.values()):
            runner.close()

    def _work(self) -> None:
        from autodispatch.worker import runner_for

        _stay_out_of_captures()
        while (item := self._waiting.get()) is not None:
            work, device = item
            name = f"{device.kind}:{device.index}"
            if name not in self._runners:
                self._runners[name] = runner_for(device)
            try:
                work(self._runners[name])
            except Exception as cause:
                _log.warning("tuning in the background: %s", cause)


def versions(layers: Layers) -> dict[str, int]:
    """A number for each database that changes when another process or connection writes to it."""
    found = {}
    for name, store in layers:
        with contextlib.suppress(StoreError):
            found[name] = store.version()
    return found


def _stay_out_of_captures() -> None:
    with contextlib.suppress(OSError, AttributeError):  # without a driver there is nothing to capture
        relax_capture_mode()
