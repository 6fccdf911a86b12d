"""Dispatcher and run(): from a call's arrays to the fastest known candidate, launched on the caller's stream.

The hot path is a key read off the arrays, a look-up in a dictionary, and the launch. Everything else happens once per
key, in `_plan`.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autodispatch import arrays, exchange, explanation, resources
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
from autodispatch.errors import (
    AutodispatchError,
    CompileError,
    DeviceError,
    LaunchError,
    StoreError,
    UnsupportedProblemError,
)
from autodispatch.explanation import Explanation
from autodispatch.layers import Layers
from autodispatch.problem import Matrix, Problem, check_overlap
from autodispatch.selection import Origin, Selection, selections
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.variants import Call, Candidate, Executable, Registry

if TYPE_CHECKING:
    from autodispatch.tuner import Progress

_log = logging.getLogger("autodispatch")


@dataclass(frozen=True)
class _Plan:
    """A key's bound launch. `executable` is None where there is nothing to compute."""

    problem: Problem
    settlement: Settlement
    device: DeviceInfo
    selection: Selection | None
    executable: Executable | None
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
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._missed: set[tuple[Any, ...]] = set()
        self._tuned: set[tuple[str, Problem]] = set()
        self._captured: list[Any] = []
        self._listener: Callable[[Progress], None] | None = None
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
            candidate: use this one, by name of the variant or as a Candidate, instead of choosing.

        Returns:
            The result, of the kind of `a`: float32 accumulation and activation, rounded once. SiLU(-inf) is 0.

        Raises:
            TypeError, ValueError: for an argument that does not fit; nothing has been launched then.
            UnsupportedProblemError: if no candidate, or not the one named, can serve the problem.
            MemoryError: if a named candidate's scratch memory cannot be had; without a name another one serves.
            CompileError, DeviceError, LaunchError.
        """
        family = family_of(a)
        ma, mb1, mb2 = family.matrix("a", a), family.matrix("b1", b1), family.matrix("b2", b2)
        mo = None if out is None else family.matrix("out", out)
        if mo is not None:
            check_overlap(mo, (("a", ma), ("b1", mb1), ("b2", mb2)))
        key = (family.name, ma.key, mb1.key, mb2.key, mo and mo.key, activation, math, precision, candidate)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plan(key, family, (ma, mb1, mb2, mo), activation, math, precision, candidate)
        result = self._launch(plan, family, ma, mb1, mb2, mo)
        return family.result(result, a) if out is None else out

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
        return self.explain_problem(problem, device, candidate=candidate, copied=settlement.copied)

    def explain_problem(
        self,
        problem: Problem,
        device: DeviceInfo | None = None,
        *,
        candidate: Candidate | str | None = None,
        copied: tuple[tuple[str, str], ...] = (),
    ) -> Explanation:
        """What a call of this problem would do, and why, on a device (by default the current one)."""
        if 0 in (problem.m, problem.n, problem.k):
            raise UnsupportedProblemError(f"m, n and k must be positive; nothing is launched otherwise (got {problem})")
        device = device or default_device()
        pinned = self._pinned(candidate, problem, device)
        layers = None if self.settings.mode == "off" else self.layers
        return explanation.explain(problem, device, self._registry, layers, pinned, copied)

    def close(self) -> None:
        """Forgets all plans and closes the databases; the next call begins anew."""
        with self._lock:
            self._plans.clear()
            self._missed.clear()
            if self._layers is not None:
                self._layers.close()
                self._layers = None

    def _plan(
        self,
        key: tuple[Any, ...],
        family: Family,
        matrices: tuple[Matrix, Matrix, Matrix, Matrix | None],
        activation: str,
        math: str,
        precision: str | None,
        candidate: Candidate | str | None,
    ) -> _Plan:
        problem, settlement = describe(*matrices, activation, math, precision)
        device_index = matrices[0].device
        copies_out = any(name == "out" for name, _ in settlement.copied)
        with self._lock:
            if key in self._plans:
                return self._plans[key]
            device = cpu_device() if device_index is None else cuda_device(device_index)
            if 0 in (problem.m, problem.n, problem.k):
                plan = _Plan(problem, settlement, device, None, None, copies_out)
            else:
                _refuse_in_capture(family, device)
                warn_of_two_cupys()
                pinned = self._pinned(candidate, problem, device)
                selection, executable = self._bind(problem, device, pinned)
                plan = _Plan(problem, settlement, device, selection, executable, copies_out)
            self._plans[key] = plan
            return plan

    def _bind(self, problem: Problem, device: DeviceInfo, pinned: Candidate | None) -> tuple[Selection, Executable]:
        """The first selection that builds. A tuned candidate that does not is passed over with a warning."""
        mode = self.settings.mode
        layers = None if mode == "off" else self.layers
        choices = selections(problem, device, self._registry, layers, pinned)
        first = next(choices)
        if layers is not None and pinned is None and self._tune_if_asked(first, layers):
            choices = selections(problem, device, self._registry, layers)
            first = next(choices)
        last: Exception | None = None
        for selection in itertools.chain([first], choices):
            try:
                with on_device(device.index):
                    executable = selection.candidate.executable(problem, device)
                    executable.prepare()
                _log.debug("%s on %s: %s, %s", problem, device.name, selection.candidate, selection.reason)
                return selection, executable
            except (CompileError, LaunchError, UnsupportedProblemError) as cause:
                if pinned is not None:
                    raise
                _log.warning("%s is passed over: %s", selection.candidate, cause)
                last = cause
        raise UnsupportedProblemError(f"some candidate must build for {problem} (got none; the last: {last})") from last

    def _tune_if_asked(self, selection: Selection, layers: Layers) -> bool:
        """Does what the mode says about a selection that was or was not tuned; True if that was to tune now."""
        problem, device, origin = selection.problem, selection.device, selection.origin
        mode = self.settings.mode
        if mode == "force" or (mode == "tune" and origin is not Origin.TUNED):
            if (device.key, problem) in self._tuned:
                return False
            self._tune(problem, device, layers.user)
            return True
        if origin is Origin.TUNED:
            return False
        if self.settings.record_misses:
            try:
                layers.user.record_miss(device.key, problem)
            except StoreError as cause:
                _log.warning("the miss of %s was not recorded: %s", problem, cause)
        kind = (device.key, problem.n, problem.k, problem.dtype, problem.layout)
        if origin is not Origin.BUCKET and kind not in self._missed:
            self._missed.add(kind)
            _log.warning(
                "%s is not tuned on %s; to tune it: autodispatch tune %s", problem, device.name, problem.options
            )
        return False

    def _tune(self, problem: Problem, device: DeviceInfo, store: TuningStore) -> None:
        # imported here, since a call measures only where its user asked for it
        from autodispatch.benchmark import workbench
        from autodispatch.runner import LocalRunner
        from autodispatch.tuner import Tuner

        self._tuned.add((device.key, problem))
        runner = LocalRunner(workbench(device))
        tuner = Tuner(
            store, runner, self._registry, listener=self._listener, command=f"run in mode {self.settings.mode}"
        )
        try:
            tuner.tune(problem, effort=self.settings.effort)
        except DeviceError:
            raise
        except AutodispatchError as cause:
            _log.warning("%s could not be tuned: %s", problem, cause)

    def _pinned(self, candidate: Candidate | str | None, problem: Problem, device: DeviceInfo) -> Candidate | None:
        if candidate is None:
            return None
        if isinstance(candidate, Candidate):
            candidate.check(problem, device)
            return candidate
        if candidate not in self._registry.variants:
            names = ", ".join(self._registry.variants)
            raise ValueError(f"candidate must be a Candidate or one of {names} (got {candidate!r})")
        variant = self._registry.variants[candidate]
        why = variant.unmet(problem, device)
        if why:
            raise UnsupportedProblemError(f"{candidate} requires {'; '.join(why)} (got {problem} on {device.name})")
        return Candidate(variant, variant.default(problem, device))

    def _launch(self, plan: _Plan, family: Family, a: Matrix, b1: Matrix, b2: Matrix, out: Matrix | None) -> Any:
        problem = plan.problem
        with on_device(plan.device.index):
            target = out if out is not None and not plan.out_is_copied else _empty(family, problem, a)
            if plan.executable is None:
                if problem.m and problem.n:
                    family.fill_zero(target.array)
            else:
                operands = arrays.operands(family, a, b1, b2, target, plan.settlement)
                stream = family.stream(plan.device.index)
                executable = plan.executable
                try:
                    workspace, memory = _workspace(family, executable, plan.device)
                except MemoryError as cause:
                    if plan.selection is None or plan.selection.origin is Origin.PINNED:
                        raise
                    executable = self._without_workspace(plan, cause)
                    workspace, memory = 0, None
                try:
                    executable(Call(operands, workspace, stream))
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
            return target.array

    def _without_workspace(self, plan: _Plan, cause: MemoryError) -> Executable:
        """A candidate for a call whose scratch memory could not be had."""
        for selection in selections(plan.problem, plan.device, self._registry):
            variant, config = selection.candidate.variant, selection.candidate.config
            if variant.path == "fused" and variant.workspace_bytes(config, plan.problem) == 0:
                _log.warning("no memory for scratch space (%s); %s serves this call", cause, selection.candidate)
                return selection.candidate.executable(plan.problem, plan.device)
        raise cause


def _empty(family: Family, problem: Problem, like: Matrix) -> Matrix:
    return family.matrix("out", family.empty(problem.m, problem.n, like))


def _workspace(family: Family, executable: Executable, device: DeviceInfo) -> tuple[int, Any]:
    if executable.workspace_bytes == 0:
        return 0, None
    return family.workspace(executable.workspace_bytes, device.index)


def _refuse_in_capture(family: Family, device: DeviceInfo) -> None:
    """A problem's first call compiles and allocates, which would spoil a capture: refuse before it does."""
    stream = family.stream(device.index)
    if stream is None:
        return
    if is_capturing(stream.ptr):
        raise LaunchError(
            "the first call of a problem must be made outside CUDA graph capture (got a capturing stream)"
        )


_default = Dispatcher()


def run(a: Any, b1: Any, b2: Any, **options: Any) -> Any:
    """`Dispatcher.run` of the process's own dispatcher."""
    return _default.run(a, b1, b2, **options)


def explain(a: Any, b1: Any, b2: Any, **options: Any) -> Explanation:
    """`Dispatcher.explain` of the process's own dispatcher."""
    return _default.explain(a, b1, b2, **options)


def configure(settings: Settings) -> None:
    """Gives the process's own dispatcher other settings, and forgets what it had planned and opened."""
    _default.close()
    _default._settings = settings


@contextmanager
def autotune(effort: str = "quick", listener: Callable[[Progress], None] | None = None) -> Iterator[None]:
    """Within it, a call of `run` that finds its problem untuned tunes it first, and remembers. `listener` hears of
    every step of that; of a call that finds its problem tuned it hears nothing. Not for several threads at once.
    """
    before = _default.settings
    configure(replace(before, mode="tune", effort=effort))
    _default._listener = listener
    try:
        yield
    finally:
        _default._listener = None
        configure(before)
