"""Two streams at once, no memory taken where the caller brings `out`, and calls that wait for what is before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autodispatch.dispatcher import Dispatcher
from autodispatch.variants import VARIANTS

pytestmark = pytest.mark.gpu
NAMES = [n for n, v in VARIANTS.items() if v.kind == "cuda"]


@pytest.fixture
def arguments(array: Callable[..., Any]) -> Callable[[], tuple[Any, Any, Any]]:
    """Fresh arguments that every variant can serve."""
    rng = np.random.default_rng(5)

    def make() -> tuple[Any, Any, Any]:
        shapes = ((2, 1032), (1032, 264), (1032, 264))
        a, b1, b2 = (array(rng.normal(0, 0.5, shape), "float16") for shape in shapes)
        return a, b1, b2

    return make


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once_do_not_disturb_one_another(
    cupy: Any, dispatcher: Dispatcher, arguments: Callable[..., Any], assert_right: Callable[..., None], name: str
) -> None:
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    inputs = [arguments() for _ in streams]
    outs = [[cupy.zeros((2, 264), np.float16) for _ in range(20)] for _ in streams]
    cupy.cuda.Device().synchronize()
    for i in range(20):
        for stream, (a, b1, b2), out in zip(streams, inputs, outs, strict=True):
            with stream:
                dispatcher.run(a, b1, b2, out=out[i], candidate=name)
    cupy.cuda.Device().synchronize()
    for given, results in zip(inputs, outs, strict=True):
        assert_right(results[0], *given)
        assert len({r.tobytes() for r in results}) == 1


@pytest.mark.parametrize("name", [n for n in NAMES if VARIANTS[n].path == "fused"])
def test_a_fused_call_with_out_allocates_nothing(
    cupy: Any, dispatcher: Dispatcher, arguments: Callable[..., Any], name: str
) -> None:
    class Counter(cupy.cuda.MemoryHook):  # type: ignore[misc,name-defined]
        name = "counter"
        calls = 0

        def malloc_preprocess(self, **_: Any) -> None:
            self.calls += 1

    a, b1, b2 = arguments()
    out = cupy.empty((2, 264), np.float16)
    dispatcher.run(a, b1, b2, out=out, candidate=name)
    with Counter() as counter:
        cupy.empty(1)
        assert counter.calls == 1
        for _ in range(3):
            dispatcher.run(a, b1, b2, out=out, candidate=name)
    assert counter.calls == 1


@pytest.fixture
def write_late(cupy: Any) -> Callable[..., None]:
    """Copies arrays in a kernel that lets the next one begin first, and takes its time."""
    text = r"""
    extern "C" __global__ void late(unsigned short* to0, const unsigned short* from0, long long count0,
                                    unsigned short* to1, const unsigned short* from1, long long count1,
                                    unsigned short* to2, const unsigned short* from2, long long count2) {
    #if __CUDA_ARCH__ >= 900
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    #endif
      const long long start = clock64();
      while (clock64() - start < 500000) {}
      for (long long i = threadIdx.x; i < count0; i += blockDim.x) to0[i] = from0[i];
      for (long long i = threadIdx.x; i < count1; i += blockDim.x) to1[i] = from1[i];
      for (long long i = threadIdx.x; i < count2; i += blockDim.x) to2[i] = from2[i];
    }"""
    kernel = cupy.RawKernel(text, "late")

    def write(targets: tuple[Any, ...], sources: tuple[Any, ...]) -> None:
        triples = ((t, s, np.int64(s.size)) for t, s in zip(targets, sources, strict=True))
        kernel((1,), (512,), tuple(x for triple in triples for x in triple))

    return write


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_call_sees_what_the_kernel_before_it_wrote(
    cupy: Any,
    dispatcher: Dispatcher,
    arguments: Callable[..., Any],
    assert_right: Callable[..., None],
    write_late: Callable[..., None],
    name: str,
    captured: bool,
) -> None:
    given = arguments()
    inputs = tuple(cupy.zeros_like(x) for x in given)
    out, again = (cupy.zeros((2, 264), np.float16) for _ in range(2))
    dispatcher.run(*inputs, out=out, candidate=name)
    dispatcher.run(*inputs, out=again, candidate=name)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for x in (*inputs, out, again):
            x.fill(float("nan"))
        dispatcher.run(*inputs, out=out, candidate=name)  # the launch is known from here on
        if captured:
            stream.begin_capture()
        write_late(inputs, given)
        dispatcher.run(*inputs, out=out, candidate=name)
        dispatcher.run(*inputs, out=again, candidate=name)  # behind one of its own kind
        if captured:
            stream.end_capture().launch(stream)
        stream.synchronize()
    assert_right(out, *given)
    assert out.tobytes() == again.tobytes()
