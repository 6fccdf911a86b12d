"""Fixtures of the tests that need a GPU. Run them with `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from autodispatch.arrays import CupyFamily, describe
from autodispatch.device import DeviceInfo, cuda_device
from autodispatch.dispatcher import Dispatcher
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
def run_all(dispatcher: Dispatcher, serving: Callable[..., list[str]]) -> Callable[..., Iterator[tuple[str, Any]]]:
    """Runs every variant that can serve the arguments: pairs of name and result."""

    def run(a: Any, b1: Any, b2: Any) -> Iterator[tuple[str, Any]]:
        names = serving(a, b1, b2)
        assert len(names) >= 3
        for name in names:
            yield name, dispatcher.run(a, b1, b2, candidate=name)

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
