"""Calls that share nothing: two streams at once, and no memory taken where the caller brings `out`."""

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
