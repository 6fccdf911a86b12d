"""Planner: which candidate serves a problem, built and loaded; what a miss leads to; and what another process tuned."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autodispatch.background import Background, look_again
from autodispatch.compiler import number_of_kernels
from autodispatch.device import DeviceInfo, on_device
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
    max_error: float | None = None
    calls: int = 0


class Planner:
    """Makes problems ready, each once, and keeps them so. May be shared between threads.

    Attributes:
        listener: hears of the steps of a tuning within a call.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        layers: Callable[[], Layers],
        lock: threading.RLock,
        on_change: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.counters = Counters()
        self.listener: Callable[[Progress], None] | None = None
        self._open_layers = layers
        self._lock = lock  # the dispatcher's own: with two, each could wait for the other
        self._on_change = on_change
        self._ready: dict[_Key, Ready] = {}
        self._missed: set[tuple[str, Problem]] = set()
        self._far: set[tuple[str, Problem]] = set()  # missed, and no decision for a near m serves them either
        self._warned: set[tuple[Any, ...]] = set()
        self._tuned: set[tuple[str, Problem]] = set()
        self._unbuildable: set[tuple[Any, ...]] = set()
        self._is_tuning = False  # in the thread that holds the lock
        self._served: Counter[str] = Counter()  # calls by what was exchanged since
        self._layers: Layers | None = None  # those asked last
        self._versions: dict[str, int] = {}
        self._background: Background | None = None
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

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
            if ready is not None:
                return ready
            layers = self.layers if pinned is None else None
            self._layers = layers or self._layers
            before = self._watch(layers)
            try:
                selection = self._select(problem, device, layers, pinned, max_error)
                ready = self._ready[key] = Ready(*selection, max_error)
            finally:  # what is tuned later must find it here, and is tuned also where it cannot be served till then
                if layers is not None and self.settings.mode == "background" and (device.key, problem) in self._far:
                    self._tune_later(problem, device, layers, max_error)
            if layers is not None and before is not None and versions(layers) != before:
                self.reload(problem)  # tuned while it was built
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

    def without_workspace(self, ready: Ready, cause: MemoryError) -> Executable:
        """A candidate for a call whose scratch memory could not be had."""
        selection, max_error = ready.selection, ready.max_error
        if selection.origin is Origin.PINNED:
            raise cause
        problem, device = selection.problem, selection.device
        layers = self.layers if max_error is not None else None
        with contextlib.suppress(UnsupportedProblemError):  # nothing that keeps max_error
            for other in selections(problem, device, self.registry, layers, None, max_error):
                variant, config = other.candidate.variant, other.candidate.config
                if variant.path == "fused" and variant.workspace_bytes(config, problem) == 0:
                    try:
                        executable = other.candidate.executable(problem, device)
                    except (CompileError, LaunchError, UnsupportedProblemError):
                        continue
                    _log.warning("no memory for scratch space (%s); %s serves this call", str(cause), other.candidate)
                    self.counters.fallbacks += 1
                    return executable
        raise cause

    def close(self) -> None:
        """Ends what runs beside the calls."""
        self._closed.set()
        if self._background is not None:
            self._background.close()

    def _select(
        self,
        problem: Problem,
        device: DeviceInfo,
        layers: Layers | None,
        pinned: Candidate | None,
        max_error: float | None,
    ) -> tuple[Selection, Executable]:
        """The first selection that builds, after what the settings say about one that was not tuned."""
        choices = selections(problem, device, self.registry, layers, pinned, max_error)
        refused: UnsupportedProblemError | None = None
        try:
            first = next(choices)
        except UnsupportedProblemError as cause:
            if max_error is None or layers is None:
                raise
            refused = cause  # nothing measured keeps max_error
        origin = None if refused is not None else first.origin
        if layers is not None and self._act_on(problem, device, origin, layers):
            choices = selections(problem, device, self.registry, layers, None, max_error)
            first, refused = next(choices), None
        if refused is not None:
            raise refused
        if self.settings.strict and first.origin in (Origin.HEURISTIC, Origin.LIBRARY):
            raise NotTunedError(_advice(problem, device) + near_miss(problem, device, self.registry, layers))
        found = self._first_that_builds(first, choices)
        built = found[0].origin
        has_failed = first.origin is Origin.BUCKET and built in (Origin.HEURISTIC, Origin.LIBRARY)
        if layers is not None and has_failed and self._act_on(problem, device, built, layers):
            choices = selections(problem, device, self.registry, layers, None, max_error)
            found = self._first_that_builds(next(choices), choices)
        return found

    def _first_that_builds(self, first: Selection, choices: Iterator[Selection]) -> tuple[Selection, Executable]:
        problem, device = first.problem, first.device
        last = "all were tried before"  # not the error itself, whose traceback would keep the caller's arrays
        before = number_of_kernels()
        for selection in itertools.chain([first], choices):
            if _named(selection) in self._unbuildable and selection.origin is not Origin.PINNED:
                continue
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
                last = str(cause)
                _log.warning("%s is passed over: %s", selection.candidate, last)
                self.counters.fallbacks += 1
                self._unbuildable.add(_named(selection))
        raise UnsupportedProblemError(f"some candidate must build for {problem} (got none; the last: {last})")

    def _act_on(self, problem: Problem, device: DeviceInfo, origin: Origin | None, layers: Layers) -> bool:
        """Does what the settings say about a selection of this origin, or none; True if that was to tune now."""
        mode = self.settings.mode
        is_far = origin not in (Origin.TUNED, Origin.BUCKET)  # so that many values of m cost one tuning per bucket
        if origin is not Origin.TUNED:
            self._miss(problem, device, origin, layers)
        if is_far:
            self._far.add((device.key, problem))
        if mode == "force" or (mode == "tune" and is_far):
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
        return False

    def _miss(self, problem: Problem, device: DeviceInfo, origin: Origin | None, layers: Layers) -> None:
        """Counts, records and tells a problem that was not tuned, once each."""
        if (device.key, problem) in self._missed:
            return
        self._missed.add((device.key, problem))
        self.counters.misses += 1
        if self.settings.record_misses:
            try:
                layers.user.record_miss(device.key, problem)
            except StoreError as cause:
                _log.warning("the miss of %s was not recorded: %s", problem, str(cause))
        kind = (device.key, replace(problem, m=1))
        is_told = origin is Origin.BUCKET or self.settings.strict or self.settings.mode != "cache"
        if not is_told and kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", _advice(problem, device))

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
            _log.warning("%s could not be tuned: %s", problem, str(cause))

    # beside the calls

    def _tune_later(self, problem: Problem, device: DeviceInfo, layers: Layers, max_error: float | None) -> None:
        if (device.key, problem) in self._tuned:
            return
        self._tuned.add((device.key, problem))
        if self._background is None:
            self._background = Background()
        self._background.add(lambda runner: self._tune_and_reload(runner, problem, device, layers, max_error), device)

    def _tune_and_reload(
        self, runner: Runner, problem: Problem, device: DeviceInfo, layers: Layers, max_error: float | None
    ) -> None:
        stored = stored_selections(problem, device, self.registry, layers, max_error)
        if all(_named(s) in self._unbuildable for s in stored):  # nothing was tuned for a near m while it waited
            self._tune_with(runner, problem, layers)
        else:
            self._tuned.discard((device.key, problem))  # a call that asks for more may have it tuned
        self.reload(problem)

    def _watch(self, layers: Layers | None) -> dict[str, int] | None:
        """Begins to look, every so many seconds, whether another process changed a database; returns their versions
        now. None where nobody is to look."""
        if layers is None or self.settings.reload_s <= 0:
            return None
        found = versions(layers)
        if self._watcher is None:
            self._versions = found
            arguments = (weakref.ref(self), self._closed, self.settings.reload_s)
            self._watcher = threading.Thread(target=look_again, args=arguments, name="autodispatch-reload", daemon=True)
            self._watcher.start()
        return found

    def reload_if_changed(self) -> None:
        """Selects anew where a database was written by others since the last time. Raises StoreError if one cannot be
        read; then the next time does."""
        found = {name: store.version() for name, store in self._layers or ()}
        if found != self._versions and self.reload():
            self._versions = found

    def reload(self, problem: Problem | None = None) -> bool:
        """Selects anew for what is ready, or for one problem of it, and exchanges what is served otherwise now.

        Whatever must be built is built here, so that no call waits for it. Returns False if a database could not be
        read; then all stays as it was for the problems that it may hold.
        """
        changed, complete = False, True
        layers = self._layers
        for key, ready in list(self._ready.items()):
            _, _, its_problem, pinned, max_error = key
            if pinned is not None or layers is None or problem not in (None, its_problem):
                continue
            try:
                found = self._select_anew(ready.selection, layers, max_error)
            except StoreError as cause:
                _log.debug("%s is served as before: %s", its_problem, str(cause))
                complete = False
                continue
            except AutodispatchError as cause:
                _log.warning("%s is served as before: %s", its_problem, str(cause))
                continue
            if found is None:
                continue
            old, (selection, executable) = ready.selection, found
            is_same = selection.candidate.key == old.candidate.key
            self._served[old.origin.value] += ready.calls
            ready.calls, ready.selection = 0, selection
            if not is_same and executable is not None:
                ready.executable, changed = executable, True
                _log.info("%s: from now on %s, %s", its_problem, selection.candidate, selection.reason)
        if changed:
            self._on_change()
        return complete

    def _select_anew(
        self, old: Selection, layers: Layers, max_error: float | None
    ) -> tuple[Selection, Executable | None] | None:
        """What serves a problem now, with an executable if it is another candidate; None where all stays as it is."""
        problem, device = old.problem, old.device
        stored = stored_selections(problem, device, self.registry, layers, max_error, strict=True)
        usable = (s for s in stored if _named(s) not in self._unbuildable)
        first = next(usable, None)
        if first is None and old.decision is None:
            return None  # by the model as before, which need not be asked again
        others = iter(()) if max_error is not None else selections(problem, device, self.registry)
        choices = itertools.chain(usable, others)
        first = first or next(choices, None)
        if first is None:
            return None
        if first.candidate.key == old.candidate.key:
            return first, None
        return self._first_that_builds(first, choices)


def _named(selection: Selection) -> tuple[Any, ...]:
    return selection.device.key, selection.device.index, selection.problem, *selection.candidate.key


def _advice(problem: Problem, device: DeviceInfo) -> str:
    return f"{problem} is not tuned on {device.name}; to tune it: autodispatch tune {problem.options}"


def versions(layers: Layers) -> dict[str, int]:
    """A number for each database that can be read, which changes when another process or connection writes to it."""
    found = {}
    for name, store in layers:
        with contextlib.suppress(StoreError):
            found[name] = store.version()
    return found
