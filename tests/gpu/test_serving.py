"""Calls as a server makes them: again and again, from threads, streams and devices, in graphs, and after a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodispatch import overhead
from autodispatch.device import DeviceInfo, cuda_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import LaunchError
from autodispatch.problem import Problem
from autodispatch.reference import dtype_of, make_inputs
from autodispatch.settings import Settings

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROBLEM = Problem(33, 512, 256, "float16", "nk")


@pytest.fixture
def inputs(device: DeviceInfo) -> Callable[..., tuple[Any, Any, Any]]:
    def make(problem: Problem = PROBLEM, seed: int = 0, index: int = 0) -> tuple[Any, Any, Any]:
        found = make_inputs(problem, cuda_device(index), seed)
        return found.a, found.b1, found.b2

    return make


def same(cupy: Any, x: Any, y: Any) -> bool:
    return bool((x.view(np.uint16) == y.view(np.uint16)).all())


# a call that came before


def test_a_repeated_call_is_launched_as_it_lies_and_right(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = inputs()
    out = cupy.zeros((33, 512), a.dtype)
    dispatcher.run(a, b1, b2, out=out)
    assert len(dispatcher._quick.launches) == 1
    for scale in (1.0, 2.0, 0.5):  # it reads what is there now
        a *= scale
        out.fill(np.nan)
        assert dispatcher.run(a, b1, b2, out=out) is out
        assert_right(out, a, b1, b2)
    assert len(dispatcher._quick.launches) == 1
    assert dispatcher.counters().calls == {"heuristic": 4}


def test_a_repeated_call_without_out_gives_new_memory(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    arguments = inputs()
    results = [dispatcher.run(*arguments) for _ in range(5)]
    assert len({r.data.ptr for r in results}) == 5
    for result in results:
        assert_right(result, *arguments)


def test_whatever_differs_from_a_call_that_came_before_is_seen(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = inputs(Problem(64, 64, 64, "float16"))
    out = cupy.empty((64, 64), a.dtype)
    for _ in range(2):
        dispatcher.run(a, b1, b2, out=out)
    with pytest.raises(ValueError, match="out must not overlap a"):
        dispatcher.run(a, b1, b2, out=a)
    other = dtype_of("bfloat16")
    with pytest.raises(TypeError, match="b1 must have the dtype of a"):
        dispatcher.run(a, b1.view(other), b2, out=out)
    with pytest.raises(TypeError, match="out must have the dtype of a"):
        dispatcher.run(a, b1, b2, out=out.view(other))
    with pytest.raises(ValueError, match="b2 must have the shape of b1"):
        dispatcher.run(a, b1, b2[:, :32], out=out)
    with pytest.raises(TypeError, match="b2 must be a CuPy array"):
        dispatcher.run(a, b1, b2.get(), out=out)
    for x, y, z in ((a, b1.T, b2.T), (a, b2, b1), (a[::-1], b1, b2), (a[:32], b1, b2)):
        into = out[: x.shape[0]]
        for _ in range(2):
            assert_right(dispatcher.run(x, y, z, out=into), x, y, z)
    for activation in ("relu", "silu", "gelu"):
        for _ in range(2):
            assert_right(dispatcher.run(a, b1, b2, out=out, activation=activation), a, b1, b2, activation=activation)


def test_arrays_that_are_gone_are_not_kept(cupy: Any, dispatcher: Dispatcher) -> None:
    import gc
    import weakref

    arrays = [cupy.ones(s, np.float16) for s in ((16, 64), (64, 64), (64, 64))]
    dispatcher.run(*arrays)
    dispatcher.run(*arrays)
    gone = [weakref.ref(x) for x in arrays]
    del arrays
    gc.collect()
    assert [f"{type(h).__name__} {h!r:.300}" for w in gone for h in gc.get_referrers(w()) if w() is not None] == []
    assert [i for i, w in enumerate(gone) if w() is not None] == []


def test_so_many_launches_are_kept_and_no_more(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autodispatch import quick

    monkeypatch.setattr(quick, "MAX_LAUNCHES", 10)
    arguments = inputs()
    outs = cupy.zeros((25, 33, 512), np.float16)
    for out in outs:
        dispatcher.run(*arguments, out=out)
    assert 0 < len(dispatcher._quick.launches) <= 10
    assert all(same(cupy, out, outs[0]) for out in outs)


# graphs


def test_a_graph_captured_after_a_warmup_replays_right(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = inputs()
    for name in (None, "split_cublas", "split_simt"):
        out = cupy.zeros((33, 512), a.dtype)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            dispatcher.warmup([PROBLEM], candidate=name)
            stream.begin_capture()
            dispatcher.run(a, b1, b2, out=out, candidate=name)
            graph = stream.end_capture()
            for scale in (1.0, 3.0):
                a *= scale
                out.fill(np.nan)
                graph.launch(stream)
                stream.synchronize()
                assert_right(out, a, b1, b2)


def test_an_untuned_problem_is_refused_in_a_capture_which_goes_on(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = inputs()
    other = inputs(Problem(7, 512, 256, "float16", "nk"))
    out = dispatcher.run(a, b1, b2)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="warmup"):
            dispatcher.run(*other)
        dispatcher.run(a, b1, b2, out=out)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    assert_right(out, a, b1, b2)


def test_a_reload_in_another_thread_spoils_no_capture(
    cupy: Any, device: DeviceInfo, tmp_path: Path, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    torch = pytest.importorskip("torch")
    d = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    a, b1, b2 = (torch.from_dlpack(x) for x in inputs())
    out = torch.empty((33, 512), dtype=torch.float16, device="cuda")
    d.run(a, b1, b2, out=out)
    ready = d.planner.find(PROBLEM, device, None, None)
    assert ready is not None
    other = next(c for c in reversed(list(d._registry.candidates(PROBLEM, device))) if c != ready.selection.candidate)

    def load() -> None:
        from autodispatch.background import _stay_out_of_captures

        _stay_out_of_captures()
        other.executable(PROBLEM, device)  # built and loaded, as by a reload

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        d.run(a, b1, b2, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(cupy.from_dlpack(out), *inputs())
    d.close()


# threads, streams, devices, processes


@pytest.mark.parametrize("several", [False, True], ids=["one key", "eight keys"])
def test_eight_threads_with_streams_of_their_own_are_right(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None], several: bool
) -> None:
    problems = [Problem(33 + i if several else 33, 512, 256, "float16", "nk") for i in range(8)]
    arguments = [inputs(p, seed) for seed, p in enumerate(problems)]
    cupy.cuda.Device().synchronize()
    barrier = threading.Barrier(8)
    results: list[list[Any]] = [[] for _ in range(8)]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                barrier.wait()
                for name in (None, None, "split_cublas", "split_simt"):
                    results[i] += [dispatcher.run(*arguments[i], candidate=name) for _ in range(10)]
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for i in range(8):
        for result in results[i][::9]:
            assert_right(result, *arguments[i])


def test_two_gpus_at_once_are_right(
    cupy: Any, dispatcher: Dispatcher, inputs: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    arguments = [inputs(index=i) for i in range(2)]
    results: list[list[Any]] = [[], []]

    def work(i: int) -> None:
        with cupy.cuda.Device(i):
            results[i] += [dispatcher.run(*arguments[i]) for _ in range(50)]
            cupy.cuda.Device().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        with cupy.cuda.Device(i):
            assert_right(results[i][-1], *arguments[i])
    for _ in range(3):  # with the other device current
        out = dispatcher.run(*arguments[1])
        assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(1):
            assert_right(out, *arguments[1])


PER_THREAD = """
import numpy as np, cupy
from cupy_backends.cuda import stream
assert stream.get_default_stream_ptr() == 2  # cudaStreamPerThread
import threading
from autodispatch import compiler, dispatcher
streams = []
call, pack = compiler.CompiledKernel.__call__, compiler.CompiledKernel.pack
compiler.CompiledKernel.__call__ = lambda s, l, a, stream: (streams.append(stream.ptr), call(s, l, a, stream))[1]
compiler.CompiledKernel.pack = lambda s, l, a, stream: (streams.append(stream), pack(s, l, a, stream))[1]
wrong = []
def work():
    a, b1, b2 = (cupy.ones(s, np.float32) for s in ((16, 64), (64, 64), (64, 64)))
    out = cupy.empty((16, 64), np.float32)
    for i in range(20):
        a.fill(i)
        dispatcher.run(a, b1, b2, out=out, activation="relu")
        if float(out[3, 3]) != (64 * i) ** 2:
            wrong.append(i)
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert not wrong, wrong
assert streams and set(streams) == {2}, set(streams)
print("right")
"""


def test_per_thread_default_streams_order_the_work(tmp_path: Path) -> None:
    env = {**os.environ, "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1", "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    result = subprocess.run([sys.executable, "-c", PER_THREAD], env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "right" in result.stdout, result.stderr


FORKED = """
import os, sys
import numpy as np, cupy
from autodispatch import DeviceError, dispatcher
arrays = [cupy.ones(s, np.float16) for s in ((16, 64), (64, 64), (64, 64))]
dispatcher.run(*arrays)
dispatcher.run(*arrays)
child = os.fork()
if child == 0:
    try:
        dispatcher.run(*arrays)
    except DeviceError as error:
        os._exit(0 if "spawn" in str(error) else 2)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_after_cuda_started_is_an_error_and_no_hang(tmp_path: Path) -> None:
    env = {**os.environ, "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    script = [sys.executable, "-W", "ignore", "-c", FORKED]
    result = subprocess.run(script, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_the_overhead_is_measured_for_every_way_to_call(device: DeviceInfo, tmp_path: Path) -> None:
    found = overhead.measure(device, rounds=2)
    assert found[0].above_us == 0 and all(x.call_us > 0 for x in found)
    assert sum("keys known" in x.way for x in found) == sum("out given" in x.way for x in found) / 2


@pytest.mark.parametrize("name", ["background", "cuda_graph", "streams", "torch_module", "hugging_face", "mlp_speed"])
def test_the_examples_run(tmp_path: Path, name: str) -> None:
    if name in ("torch_module", "hugging_face", "mlp_speed"):
        pytest.importorskip("torch")
    if name in ("hugging_face", "mlp_speed"):
        pytest.importorskip("transformers")
    env = {**os.environ, "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    script = [sys.executable, str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
