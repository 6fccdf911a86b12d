"""The check on the GPU finds what the check by arrays finds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from autodispatch import reference
from autodispatch.device import DeviceInfo
from autodispatch.problem import Problem
from autodispatch.reference import Checker, compare, decode, encode
from tests.gpu.conftest import DTYPES

pytestmark = pytest.mark.gpu
SPECIALS = (0.0, -0.0, 1.0, 2.0**-24, 2.0**-126, 65504.0, 65519.9, 1e5, -1e5, 3e38, 3.5e38, np.inf, -np.inf, np.nan)


def bits(array: Any) -> Any:
    """The elements as unsigned integers, which every array library can copy."""
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def rounded(cupy: Any, values: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        return bits(encode(cupy.asarray(np.asarray(values, np.float32)), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_special_values_is_judged_as_by_arrays(device: DeviceInfo, cupy: Any, dtype: str) -> None:
    values = np.array(SPECIALS)
    triples = np.stack(np.meshgrid(values, values, [0.0, 1e-3, 60.0, np.inf, np.nan]), -1).reshape(-1, 3)
    problem = Problem(1, len(triples), 8, dtype)
    checker = Checker(problem, device)
    actual, expected, tolerance = (triples[None, :, i].copy() for i in range(3))
    written = rounded(cupy, actual, dtype)
    as_double = decode(written.view(reference.dtype_of(dtype))).get()
    several = 0
    for column in range(len(triples)):  # each alone wrong or right, all else as expected
        one = [x[:, column : column + 1] for x in (as_double, expected, tolerance)]
        status = compare(np, *one, dtype).status
        several += status == "ok"
        checker._expected = cupy.zeros((1, len(triples)))
        checker._tolerance = cupy.ones((1, len(triples)))
        checker._expected[0, column], checker._tolerance[0, column] = expected[0, column], tolerance[0, column]
        checker.poison()
        bits(checker.output.array)[...] = 0
        bits(checker.output.array)[0, column] = written[0, column]
        assert checker.verdict().status == status, triples[column]
    assert 0 < several < len(triples)


@pytest.mark.parametrize("alignment", [4, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_and_the_first_wrong_element_are_those_of_the_check_by_arrays(
    device: DeviceInfo, cupy: Any, dtype: str, alignment: int
) -> None:
    checker = Checker(Problem(301, 77, 40, dtype, "nk", alignment), device)
    expected, tolerance = checker._expected.get(), checker._tolerance.get()
    checker.poison()
    bits(checker.output.array)[...] = rounded(cupy, expected, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a check of what is right has nothing to warn of
        found = checker.verdict()
    by_arrays = compare(np, decode(checker.output.array).get(), expected, tolerance, dtype)
    assert found.status == by_arrays.status == "ok"
    assert found.relative_error == pytest.approx(by_arrays.relative_error, rel=1e-12)
    assert found.max_error == pytest.approx(by_arrays.max_error, rel=1e-12)
    assert checker.verdict() == found  # to the last bit, since ties are broken by it
    bits(checker.output.array)[200:203, 3] = rounded(cupy, [9.0], dtype)
    found = checker.verdict()
    by_arrays = compare(np, decode(checker.output.array).get(), expected, tolerance, dtype)
    assert (found.status, found.reason) == ("wrong_result", by_arrays.reason)
    assert "3 of" in found.reason and "(200, 3)" in found.reason
    assert found.max_error == pytest.approx(by_arrays.max_error, rel=1e-12)


@pytest.mark.parametrize("where", ["first", "before", "beside", "beside the last row", "after", "last"])
def test_a_single_write_around_the_output_is_found(device: DeviceInfo, cupy: Any, where: str) -> None:
    problem = Problem(5, 24, 8, "bfloat16")
    checker = Checker(problem, device)
    output = checker.output
    checker.poison()
    bits(output.array)[...] = rounded(cupy, checker._expected.get(), problem.dtype)
    assert checker.verdict().status == "ok"
    end = output.start + problem.m * output.stride
    places = {"first": 0, "before": output.start - 1, "beside": output.start + problem.n, "last": -1}
    places |= {"beside the last row": end - 1, "after": end}
    bits(output.buffer)[places[where]] = 0
    assert checker.verdict().status == "out_of_bounds"


def test_unchecked_rows_of_a_large_result_are_left_alone(
    device: DeviceInfo, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_MAX_CHECKED", 4096)
    checker = Checker(Problem(1000, 16, 8, "float32"), device)
    checker.poison()
    for rows, expected in zip(checker._rows, np.split(checker._expected.get(), len(checker._rows)), strict=True):
        bits(checker.output.array)[rows] = rounded(cupy, expected, "float32")
    assert len(checker._rows) == 8 and checker.verdict().status == "ok"
    checker.output.array[checker._rows[3].stop] = 5  # not checked
    assert checker.verdict().status == "ok"
    checker.output.array[checker._rows[3].start] = 5
    assert checker.verdict().status == "wrong_result"
