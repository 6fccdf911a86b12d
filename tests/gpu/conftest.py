"""Fixtures of the tests that need a GPU. Run them with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from autodispatch.arrays import CupyFamily, describe
from autodispatch.device import DeviceInfo, cuda_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.launch import round_up
from autodispatch.reference import compare, decode, encode, reference
from autodispatch.variants import VARIANTS

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="session")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture(scope="session")
def device(cupy: Any) -> DeviceInfo:
    return cuda_device(0)


@pytest.fixture(scope="session")
def array(cupy: Any) -> Callable[[Any, str], Any]:
    """Values as a CuPy array of a dtype, rounded to nearest even."""

    def make(values: Any, dtype: str) -> Any:
        return encode(cupy.asarray(np.asarray(values, np.float32)), dtype)

    return make


@pytest.fixture
def serving(cupy: Any, device: DeviceInfo) -> Callable[..., list[str]]:
    """The names of the variants that can serve these arguments, each with its default config."""
    family = CupyFamily()

    def names(a: Any, b1: Any, b2: Any) -> list[str]:
        matrices = [family.matrix(n, x) for n, x in (("a", a), ("b1", b1), ("b2", b2))]
        problem, _ = describe(*matrices, None)
        return [n for n, v in VARIANTS.items() if not v.unmet(problem, device)]

    return names


@pytest.fixture
def run_all(
    cupy: Any, dispatcher: Dispatcher, serving: Callable[..., list[str]]
) -> Callable[..., Iterator[tuple[str, Any]]]:
    """Runs every variant that can serve the arguments, as they are or with n and k filled up with zeros to multiples of
    8 in aligned rows, as some variants want them: pairs of name and result."""

    def filled(x: Any, rows: int, columns: int) -> Any:
        y = cupy.zeros((rows, columns), x.dtype)
        y[: x.shape[0], : x.shape[1]] = x
        return y

    def run(a: Any, b1: Any, b2: Any) -> Iterator[tuple[str, Any]]:
        names = serving(a, b1, b2)
        assert len(names) >= 3
        for name in names:
            yield name, dispatcher.run(a, b1, b2, candidate=name)
        (m, k), n = a.shape, b1.shape[1]
        k8, n8 = round_up(k, 8), round_up(n, 8)
        wide = filled(a, m, k8), filled(b1, k8, n8), filled(b2, k8, n8)
        more = [name for name in serving(*wide) if name not in names]
        if cupy.cuda.Device().compute_capability == "90" and a.dtype.itemsize == 2:
            assert {"fused_wgmma", "fused_wgmma_small", "split_wgmma"} <= {*names, *more}
        for name in more:
            yield name, dispatcher.run(*wide, candidate=name)[:, :n]

    return run


@pytest.fixture
def assert_right(cupy: Any) -> Callable[..., None]:
    """Asserts that a result is what the float64 reference and the tolerance allow."""
    family = CupyFamily()

    def check(out: Any, a: Any, b1: Any, b2: Any, **options: Any) -> None:
        matrices = [family.matrix(n, x) for n, x in (("a", a), ("b1", b1), ("b2", b2))]
        problem, _ = describe(*matrices, None, **options)
        expected, tolerance = reference(a, b1, b2, problem)
        found = compare(cupy, decode(out), expected, tolerance, problem.dtype)
        assert found.status == "ok", found.reason

    return check
