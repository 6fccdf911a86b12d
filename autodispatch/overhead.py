"""What a call costs on the CPU above a bare launch of the same kernel with ready arguments, in one interleaved run."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from autodispatch.arrays import family_of
from autodispatch.device import DeviceInfo, import_cupy, on_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.problem import Problem
from autodispatch.reference import Inputs, bind, make_inputs
from autodispatch.settings import Settings
from autodispatch.variants.executables import OneKernelExecutable

_CALLS = 400  # between two waits for the device, whose queue must not fill up
KNOWN_KEYS = 10_000
_PROBLEM = Problem(1, 256, 256, "float16", "nk")  # so small that the device is done before the next call
_CANDIDATE = "fused_gemv"
_BARE = "bare launch (CuPy)"


class Overhead(NamedTuple):
    """A way to call: microseconds of CPU time per call in the median, and above the bare launch."""

    way: str
    call_us: float
    above_us: float


def measure(device: DeviceInfo, rounds: int = 30) -> list[Overhead]:
    """The ways to call, the bare launch first. Needs a GPU; PyTorch's ways are there where it is installed."""
    cupy = import_cupy()
    dispatcher = Dispatcher(replace(Settings.from_environment(), mode="off"))
    with on_device(device.index):
        inputs = make_inputs(_PROBLEM, device)
        a, b1, b2 = inputs.a, inputs.b1, inputs.b2
        out = cupy.empty((_PROBLEM.m, _PROBLEM.n), a.dtype)
        ways = {_BARE: _bare(dispatcher, device, inputs, out)}
        ways["run, out given"] = lambda: dispatcher.run(a, b1, b2, out=out, candidate=_CANDIDATE)
        ways["run"] = lambda: dispatcher.run(a, b1, b2, candidate=_CANDIDATE)
        if importlib.util.find_spec("torch") is not None:
            import torch

            ta, tb1, tb2, tout = (torch.from_dlpack(x) for x in (a, b1, b2, out))
            ways["run, PyTorch, out given"] = lambda: dispatcher.run(ta, tb1, tb2, out=tout, candidate=_CANDIDATE)
            ways["run, PyTorch"] = lambda: dispatcher.run(ta, tb1, tb2, candidate=_CANDIDATE)
        found = _timed(cupy, ways, rounds)
        several = cupy.empty((KNOWN_KEYS, _PROBLEM.n), a.dtype)
        for i in range(KNOWN_KEYS):
            dispatcher.run(a, b1, b2, out=several[i : i + 1], candidate=_CANDIDATE)
        more = {f"{way}, {KNOWN_KEYS:,} keys known": call for way, call in ways.items() if "out given" in way}
        again = _timed(cupy, {_BARE: ways[_BARE], **more}, rounds)
    dispatcher.close()
    bare, bare_again = found[_BARE], again.pop(_BARE)
    rows = [Overhead(way, us, us - bare) for way, us in found.items()]
    return rows + [Overhead(way, us, us - bare_again) for way, us in again.items()]


def _bare(dispatcher: Dispatcher, device: DeviceInfo, inputs: Inputs, out: Any) -> Callable[[], None]:
    (selection,) = dispatcher.warmup([_PROBLEM], device=device, candidate=_CANDIDATE)
    executable = dispatcher.planner.make_ready(_PROBLEM, device, selection.candidate).executable
    assert isinstance(executable, OneKernelExecutable)
    arguments = executable.arguments(bind(family_of(out), inputs, out))
    launch, function = executable._launch, executable._kernel.function
    grid, block = (*launch.grid, 1), (launch.threads, 1, 1)
    return lambda: function(grid, block, arguments, shared_mem=launch.shared_bytes)


def _timed(cupy: Any, ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Microseconds per call, the median of interleaved rounds."""
    device = cupy.cuda.Device()
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        for _ in range(20):
            call()
    for _ in range(rounds):
        for way, call in ways.items():
            device.synchronize()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            samples[way].append((time.perf_counter() - start) / _CALLS * 1e6)
    device.synchronize()
    return {way: statistics.median(s) for way, s in samples.items()}
