"""Values at the edge: every variant follows one policy, and agrees with every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autodispatch.dispatcher import Dispatcher
from autodispatch.reference import decode
from tests.gpu.conftest import DTYPES

pytestmark = pytest.mark.gpu
INF = float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (-INF, 2.0, 0.0),
        (-100.0, 2.0, 0.0),
        (-6e4, 2.0, 0.0),
        (-1e30, 2.0, 0.0),
        (INF, 1.0, INF),
        (INF, -1.0, -INF),
        (-INF, INF, np.nan),
        (0.0, 5.0, 0.0),
        (np.nan, 1.0, np.nan),
        (1.0, np.nan, np.nan),
    ],
)
def test_the_activation_takes_its_limits(
    run_all: Callable[..., Any], array: Callable[..., Any], dtype: str, gate: float, up: float, expected: float
) -> None:
    if dtype == "float16" and gate == -1e30:
        gate = -INF  # what the type makes of it
    for name, out in run_all(array([[1.0]], dtype), array([[gate]], dtype), array([[up]], dtype)):
        np.testing.assert_allclose(float(decode(out)[0, 0]), expected, atol=1e-37, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "gate", "up", "expected"),
    [("bfloat16", -8.0, 1.0, -0.002683401107788086), ("float16", -12.0, 1.0, -7.372857e-05)],
)
def test_the_negative_tail_keeps_its_relative_accuracy(
    run_all: Callable[..., Any], array: Callable[..., Any], dtype: str, gate: float, up: float, expected: float
) -> None:
    for name, out in run_all(array([[1.0]], dtype), array([[gate]], dtype), array([[up]], dtype)):
        assert float(decode(out)[0, 0]) == pytest.approx(expected, rel=2.0**-8), name


def test_fp32_tail_is_accurate_down_to_the_smallest_normal_number(
    run_all: Callable[..., Any], array: Callable[..., Any]
) -> None:
    gates = np.linspace(-88, 30, 400, dtype=np.float32)[None, :]
    x = gates.astype(np.float64)
    expected = x / (1 + np.exp(-x))
    for name, out in run_all(array([[1.0]], "float32"), array(gates, "float32"), array(np.ones_like(gates), "float32")):
        np.testing.assert_allclose(out.get(), expected, rtol=2e-6, err_msg=name)


def test_a_finite_result_stays_finite_whichever_candidate_computes_it(
    run_all: Callable[..., Any], array: Callable[..., Any]
) -> None:
    a, b2 = array([[200.0, 200.0]], "float16"), array([[175.0], [175.0]], "float16")
    for gate, expected in ((-0.05, -20 * 70000 * 2.0611536e-9), (-2.5, 0.0)):
        for name, out in run_all(a, array([[gate], [gate]], "float16"), b2):
            assert float(out[0, 0]) == pytest.approx(expected, rel=0.02, abs=1e-7), name


def test_a_result_past_the_largest_half_is_the_same_infinity_everywhere(
    run_all: Callable[..., Any], array: Callable[..., Any]
) -> None:
    for name, out in run_all(
        array([[200.0]], "float16"), array([[2.0, 2.0]], "float16"), array([[200.0, -200.0]], "float16")
    ):
        assert out.get().tolist() == [[INF, -INF]], name


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_once(
    run_all: Callable[..., Any], array: Callable[..., Any], assert_right: Callable[..., None], dtype: str
) -> None:
    rng = np.random.default_rng(3)
    gates, ups = array(rng.normal(0, 2, (1, 4096)), dtype), array(rng.normal(0, 1, (1, 4096)), dtype)
    one = array([[1.0]], dtype)
    x, y = decode(gates).get(), decode(ups).get()
    exact = (x / (1 + np.exp(-x)) * y).astype(np.float32)
    results = []
    for name, out in run_all(one, gates, ups):
        assert_right(out, one, gates, ups)
        nearest = decode(array(exact, dtype)).get()
        # all but those that fp32 evaluation leaves next to a tie
        assert np.mean(decode(out).get() == nearest) > (0.999 if dtype != "float32" else 0.3), name
        results.append(decode(out).get())
    if dtype != "float32":
        assert all(np.mean(r == results[0]) > 0.999 for r in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_appears_exactly_where_the_formula_has_it(
    run_all: Callable[..., Any], array: Callable[..., Any], dtype: str
) -> None:
    def ones() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.ones((4, 8)), np.ones((8, 8)), np.ones((8, 8))

    a, b1, b2 = ones()
    a[2, 3] = np.nan
    for name, out in run_all(array(a, dtype), array(b1, dtype), array(b2, dtype)):
        nan = np.isnan(decode(out).get())
        assert nan[2].all() and not np.delete(nan, 2, 0).any(), name
    a, b1, b2 = ones()
    b1[1, 5] = np.nan
    for name, out in run_all(array(a, dtype), array(b1, dtype), array(b2, dtype)):
        nan = np.isnan(decode(out).get())
        assert nan[:, 5].all() and not np.delete(nan, 5, 1).any(), name
    a, b1, b2 = ones()
    a[1, 0], b2[0, 4] = 0.0, INF
    for name, out in run_all(array(a, dtype), array(b1, dtype), array(b2, dtype)):
        nan = np.isnan(decode(out).get())
        assert nan[1, 4] and nan.sum() == 1, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 31, 32, 33, 63])
def test_memory_beyond_the_operands_is_never_multiplied_in(
    cupy: Any,
    run_all: Callable[..., Any],
    array: Callable[..., Any],
    assert_right: Callable[..., None],
    dtype: str,
    k: int,
) -> None:
    m, n = 5, 24
    rng = np.random.default_rng(k)
    # rows padded to 16 bytes with NaN behind each, which tensor-core kernels take; and rows packed with NaN around all
    for widths in ((64, 32, 32), (k, n, n)):
        parts = []
        for rows, columns, width in zip((m, k, k), (k, n, n), widths, strict=True):
            buffer = array(np.full((rows + 2, max(width, columns)), np.nan), dtype)
            view = buffer[1 : rows + 1, :columns]
            view[...] = array(rng.normal(0, 1, (rows, columns)), dtype)
            parts.append(view)
        names = []
        for name, out in run_all(*parts):
            names.append(name)
            assert bool(cupy.isfinite(decode(out)).all()), name
            assert_right(out, *parts)
        if widths[0] == 64 and dtype != "float32":
            assert {"fused_mma", "split_mma"} <= set(names)


def test_empty_inner_dimension_gives_zeros_over_whatever_was_there(
    cupy: Any, dispatcher: Dispatcher, array: Callable[..., Any]
) -> None:
    out = cupy.full((4, 8), np.nan, np.float16)
    a, b = cupy.empty((4, 0), np.float16), cupy.empty((0, 8), np.float16)
    assert dispatcher.run(a, b, b, out=out) is out
    assert out.get().tolist() == [[0.0] * 8] * 4


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (0, 0, 0)])
def test_empty_results_launch_nothing_and_leave_their_surroundings_alone(
    cupy: Any, dispatcher: Dispatcher, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    guard = cupy.full((m + 2, n + 16), np.nan, np.float16)
    a, b = cupy.ones((m, k), np.float16), cupy.ones((k, n), np.float16)
    out = dispatcher.run(a, b, b, out=guard[1 : m + 1, 8 : n + 8])
    assert out.shape == (m, n) and dispatcher.run(a, b, b).shape == (m, n)
    assert bool(cupy.isnan(guard).all())
    assert dispatcher.layers.user.counts()["measurements"] == 0
    one = cupy.ones((1, 1), np.float16)
    assert float(dispatcher.run(one, one, one)[0, 0]) == pytest.approx(0.7310586, rel=1e-3)
