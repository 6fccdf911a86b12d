"""Dispatcher and run(): from a call's arrays to the fastest known candidate, launched on the caller's stream.

The hot path is a key read off the arrays, a look-up in a dictionary, and the launch. Everything else happens once per
key, in `_plan`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from autodispatch import arrays, driver, exchange, explanation, resources
from autodispatch.arrays import CupyFamily, Family, Settlement, describe, family_of
from autodispatch.device import (
    DeviceInfo,
    cpu_device,
    cuda_device,
    default_device,
    is_capturing,
    on_device,
    warn_of_two_cupys,
)
from autodispatch.driver import PackedLaunch
from autodispatch.errors import LaunchError, UnsupportedProblemError
from autodispatch.explanation import Explanation
from autodispatch.layers import Layers
from autodispatch.metrics import Counters
from autodispatch.planning import Planner, Ready
from autodispatch.problem import Matrix, Problem, check_overlap
from autodispatch.quick import QuickCalls
from autodispatch.selection import Selection
from autodispatch.settings import Settings
from autodispatch.variants import Call, Candidate, Executable, Registry

if TYPE_CHECKING:
    from autodispatch.tuner import Progress

_log = logging.getLogger("autodispatch")


@dataclass(frozen=True)
class _Plan:
    """How calls with one key are made. `ready` is None where there is nothing to compute."""

    problem: Problem
    settlement: Settlement
    device: DeviceInfo
    ready: Ready | None
    out_is_copied: bool


class Dispatcher:
    """Runs problems by the fastest known candidate. One per process is enough; it may be shared between threads.

    Nothing is opened or imported until the first call. Settings come from the environment unless given. Scratch memory
    and copies that a CuPy graph capture recorded are kept as long as the dispatcher, since the graph uses them.
    """

    def __init__(
        self, settings: Settings | None = None, *, registry: Registry | None = None, layers: Layers | None = None
    ) -> None:
        self._settings = settings
        self._registry = registry or Registry()
        self._layers = layers
        self._captured: list[Any] = []
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        """As new; in a process that was forked, where another thread may have held the lock."""
        self._planner: Planner | None = None
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._quick = QuickCalls()
        self._lock = threading.RLock()

    @property
    def settings(self) -> Settings:
        if self._settings is None:
            self._settings = Settings.from_environment()
        return self._settings

    @property
    def layers(self) -> Layers:
        """The databases, opened at first use."""
        with self._lock:
            if self._layers is None:
                s = self.settings
                self._layers = Layers.open(s.database, s.read_only_databases, exchange.load_seeds(resources.seeds()))
            return self._layers

    @property
    def planner(self) -> Planner:
        """What makes problems ready, begun at first use."""
        if (found := self._planner) is not None:  # without the lock, which is held while something is built or tuned
            return found
        with self._lock:
            if self._planner is None:
                self.settings.start_log()
                layers, forget = (lambda: self.layers), self._quick.clear
                self._planner = Planner(self.settings, self._registry, layers, self._lock, forget)
            return self._planner

    def run(
        self,
        a: Any,
        b1: Any,
        b2: Any,
        *,
        out: Any = None,
        activation: str = "silu",
        math: str = "exact",
        precision: str | None = None,
        max_error: float | None = None,
        candidate: Candidate | str | None = None,
    ) -> Any:
        """Computes out = activation(a @ b1) * (a @ b2).

        Args:
            a: (m, k); b1, b2: (k, n); all float32, float16 or bfloat16, on one device. CuPy, PyTorch or any array with
                DLPack or `__cuda_array_interface__` on a GPU; NumPy on the CPU. Weights kept as (n, k) are passed as
                transposed views.
            out: (m, n) array for the result, which may not overlap an input; a new one by default.
            activation: of the gate a @ b1: `silu`, `gelu`, `gelu_tanh`, `relu` or `sigmoid`.
            math: `exact` rounds once, at the store; `fast` also allows bfloat16 intermediates for bfloat16 data, and
                for float32 the approximation of the activation that 16-bit results have anyway.
            precision: for float32, `ieee` (the default) or `tf32`.
            max_error: choose the fastest of the candidates whose largest error, over the root mean square of the
                result, was at most this when they were tuned.
            candidate: use this one, by name of the variant or as a Candidate, instead of choosing.

        Returns:
            The result, of the kind of `a`: float32 accumulation and activation, rounded once. SiLU(-inf) is 0.

        Raises:
            TypeError, ValueError: for an argument that does not fit; nothing has been launched then.
            UnsupportedProblemError: if no candidate, or not the one named, can serve the problem, or none is known to
                keep `max_error`.
            NotTunedError: for a problem that was not tuned, where AUTODISPATCH_STRICT is set.
            MemoryError: if a named candidate's scratch memory cannot be had; without a name another one serves.
            CompileError, DeviceError, LaunchError.
        """
        calls = self._quick
        quick = calls.kinds.get(type(a))
        if quick is not None:
            try:
                key = quick.key(a, b1, b2, out, activation, math, precision, max_error, candidate)
            except AttributeError:  # arrays of several kinds, which the long way refuses
                key = None
            launch = calls.launches.get(key)
            if launch is not None:
                dtype = launch.dtype
                if (
                    a.dtype is dtype
                    and b1.dtype is dtype
                    and b2.dtype is dtype
                    and out.dtype is dtype
                    and launch.launch(launch.configuration, launch.function, launch.parameters, None) == 0
                ):
                    launch.ready.calls += 1
                    return out
            elif out is None and (shape := calls.shapes.get(key)) is not None:
                options: dict[str, Any] = {"activation": activation, "math": math, "precision": precision}
                new = quick.empty(a, shape)
                return self.run(a, b1, b2, out=new, **options, max_error=max_error, candidate=candidate)
        return self._run(a, b1, b2, out, activation, math, precision, max_error, candidate)

    def _run(self, a: Any, b1: Any, b2: Any, out: Any, *options: Any) -> Any:
        """The long way, and what makes the next call with these arrays a short one."""
        family = family_of(a)
        ma, mb1, mb2 = family.matrix("a", a), family.matrix("b1", b1), family.matrix("b2", b2)
        mo = None if out is None else family.matrix("out", out)
        if mo is not None:
            check_overlap(mo, (("a", ma), ("b1", mb1), ("b2", mb2)))
        key = (family.name, ma.key, mb1.key, mb2.key, mo and mo.key, *options)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, family, (ma, mb1, mb2, mo), *options)
        ready = plan.ready
        executable = ready.executable if ready is not None else None
        result, packed = self._launch(plan, family, ma, mb1, mb2, mo)
        if packed is not None and ready is not None:
            self._quick.remember(family, packed, ready, (a, b1, b2), out, result, options)
            if ready.executable is not executable:  # exchanged by a reload meanwhile
                self._quick.clear()
        return family.result(result, a) if out is None else out

    def warmup(
        self,
        problems: Iterable[Problem],
        *,
        device: DeviceInfo | None = None,
        max_error: float | None = None,
        candidate: Candidate | str | None = None,
    ) -> list[Selection]:
        """Selects, builds and loads what calls of these problems will run, on a device (by default the current one), so
        that no call waits for it, and calls can be captured into a CUDA graph. Returns the selections.

        Raises what `run` raises.
        """
        device = device or default_device()
        found = []
        for problem in problems:
            pinned = self.planner.pinned(candidate, problem, device)
            ready = self.planner.make_ready(problem, device, pinned, max_error)
            with on_device(device.index):
                ready.executable.prepare()
            found.append(ready.selection)
        return found

    def explain(
        self,
        a: Any,
        b1: Any,
        b2: Any,
        *,
        out: Any = None,
        activation: str = "silu",
        math: str = "exact",
        precision: str | None = None,
        max_error: float | None = None,
        candidate: Candidate | str | None = None,
    ) -> Explanation:
        """What `run` would do with these arguments, and why. Launches nothing, compiles nothing.

        Raises what `run` raises for wrong arguments, and UnsupportedProblemError where there is nothing to compute.
        """
        family = family_of(a)
        ma, mb1, mb2 = family.matrix("a", a), family.matrix("b1", b1), family.matrix("b2", b2)
        mo = None if out is None else family.matrix("out", out)
        problem, settlement = describe(ma, mb1, mb2, mo, activation, math, precision)
        if mo is not None:
            check_overlap(mo, (("a", ma), ("b1", mb1), ("b2", mb2)))
        device = cpu_device() if ma.device is None else cuda_device(ma.device)
        return self.explain_problem(problem, device, max_error=max_error, candidate=candidate, copied=settlement.copied)

    def explain_problem(
        self,
        problem: Problem,
        device: DeviceInfo | None = None,
        *,
        max_error: float | None = None,
        candidate: Candidate | str | None = None,
        copied: tuple[tuple[str, str], ...] = (),
    ) -> Explanation:
        """What a call of this problem would do, and why, on a device (by default the current one)."""
        if 0 in (problem.m, problem.n, problem.k):
            raise UnsupportedProblemError(f"m, n and k must be positive; nothing is launched otherwise (got {problem})")
        device = device or default_device()
        pinned = self.planner.pinned(candidate, problem, device)
        return explanation.explain(problem, device, self._registry, self.planner.layers, pinned, copied, max_error)

    def counters(self) -> Counters:
        """What this dispatcher did so far, or since it was closed."""
        return self.planner.snapshot()

    def close(self) -> None:
        """Forgets all plans, ends what runs in the background and closes the databases; the next call begins anew."""
        with self._lock:
            if self._planner is not None:
                self._planner.close()
            if self._layers is not None:
                self._layers.close()
                self._layers = None
            self._forget()

    def _plan(
        self,
        key: tuple[Any, ...],
        family: Family,
        matrices: tuple[Matrix, Matrix, Matrix, Matrix | None],
        activation: str,
        math: str,
        precision: str | None,
        max_error: float | None,
        candidate: Candidate | str | None,
    ) -> _Plan:
        problem, settlement = describe(*matrices, activation, math, precision)
        device_index = matrices[0].device
        copies_out = any(name == "out" for name, _ in settlement.copied)
        with self._lock:
            if key in self._plans:
                return self._plans[key]
            device = cpu_device() if device_index is None else cuda_device(device_index)
            ready = None
            if 0 not in (problem.m, problem.n, problem.k):
                pinned = self.planner.pinned(candidate, problem, device)
                ready = self.planner.find(problem, device, pinned, max_error)
                if ready is None:
                    _refuse_in_capture(family, device)
                    warn_of_two_cupys()
                    ready = self.planner.make_ready(problem, device, pinned, max_error)
            plan = self._plans[key] = _Plan(problem, settlement, device, ready, copies_out)
            return plan

    def _launch(
        self, plan: _Plan, family: Family, a: Matrix, b1: Matrix, b2: Matrix, out: Matrix | None
    ) -> tuple[Any, PackedLaunch | None]:
        """The result, and the launch that made it if it can be repeated with the same arrays."""
        problem, ready = plan.problem, plan.ready
        with on_device(plan.device.index):
            target = out if out is not None and not plan.out_is_copied else _empty(family, problem, a)
            packed = None
            if ready is None:
                if problem.m and problem.n:
                    family.fill_zero(target.array)
            else:
                operands = arrays.operands(family, a, b1, b2, target, plan.settlement)
                stream = family.stream(plan.device.index)
                executable = ready.executable
                ready.calls += 1
                if plan.settlement.copied:
                    self.planner.counters.copies += len(plan.settlement.copied)
                try:
                    workspace, memory = _workspace(family, executable, plan.device)
                except MemoryError as cause:
                    executable = self.planner.without_workspace(ready, cause)
                    workspace, memory = 0, None
                call = Call(operands, workspace, stream)
                try:
                    is_usual = executable is ready.executable and memory is None and not plan.settlement.copied
                    if family.has_quick_calls and is_usual:
                        packed = executable.pack(call)
                    if packed is None or driver.launch_kernel()(*packed.addresses, None):
                        packed = None
                        executable(call)
                except (RuntimeError, OSError) as cause:
                    raise LaunchError(
                        f"{problem} must launch on {plan.device.name} (got {type(cause).__name__}: {cause})"
                    ) from cause
                # after this call the pool may hand the memory out again, ordered on the same stream; not so the memory
                # that a captured graph will use at every replay (PyTorch's graphs keep theirs themselves)
                temporary = memory is not None or plan.settlement.copied
                if temporary and stream is not None and isinstance(family, CupyFamily) and is_capturing(stream.ptr):
                    given = [x.array for x in (a, b1, b2, out) if x is not None]
                    copies = [x.array for x in operands if not any(x.array is g for g in given)]
                    self._captured.append((memory, copies))
            if out is not None and plan.out_is_copied:
                family.assign(out.array, target.array)
            return target.array, packed


def _empty(family: Family, problem: Problem, like: Matrix) -> Matrix:
    return family.matrix("out", family.empty(problem.m, problem.n, like))


def _workspace(family: Family, executable: Executable, device: DeviceInfo) -> tuple[int, Any]:
    if executable.workspace_bytes == 0:
        return 0, None
    return family.workspace(executable.workspace_bytes, device.index)


def _refuse_in_capture(family: Family, device: DeviceInfo) -> None:
    """A problem's first call compiles and allocates, which would spoil a capture: refuse before it does."""
    stream = family.stream(device.index)
    if stream is not None and is_capturing(stream.ptr):
        raise LaunchError(
            "the first call of a problem must be made outside CUDA graph capture, or warmup() before it "
            "(got a capturing stream)"
        )


_all: WeakSet[Dispatcher] = WeakSet()
_default = Dispatcher()


def _after_fork() -> None:
    """In the child: connections, locks, threads and CUDA's state are the parent's."""
    for dispatcher in list(_all):
        dispatcher._layers = None
        dispatcher._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def run(a: Any, b1: Any, b2: Any, **options: Any) -> Any:
    """`Dispatcher.run` of the process's own dispatcher."""
    return _default.run(a, b1, b2, **options)


def explain(a: Any, b1: Any, b2: Any, **options: Any) -> Explanation:
    """`Dispatcher.explain` of the process's own dispatcher."""
    return _default.explain(a, b1, b2, **options)


def warmup(problems: Iterable[Problem], **options: Any) -> list[Selection]:
    """`Dispatcher.warmup` of the process's own dispatcher."""
    return _default.warmup(problems, **options)


def counters() -> Counters:
    """`Dispatcher.counters` of the process's own dispatcher."""
    return _default.counters()


def configure(settings: Settings) -> None:
    """Gives the process's own dispatcher other settings, and forgets what it had planned and opened."""
    _default.close()
    _default._settings = settings


@contextmanager
def autotune(effort: str = "quick", listener: Callable[[Progress], None] | None = None) -> Iterator[None]:
    """Within it, a call of `run` whose problem no decision serves, for a near m either, tunes it first, and remembers.
    `listener` hears of every step of that; of a call that is served it hears nothing. Not for several threads at once.
    """
    before = _default.settings
    configure(replace(before, mode="tune", effort=effort))
    _default.planner.listener = listener
    try:
        yield
    finally:
        configure(before)
