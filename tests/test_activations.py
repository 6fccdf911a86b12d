"""The activations against their definitions, evaluated with 60 digits or by the math library."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable

import numpy as np
import pytest

from autodispatch.activations import ACTIVATIONS, MAX_SLOPE
from autodispatch.problem import ACTIVATIONS as NAMES
from autodispatch.problem import Problem
from autodispatch.shapes import problems

D = decimal.Decimal
GATES = np.concatenate([-np.geomspace(1e-6, 37.0, 300)[::-1], [0.0], np.geomspace(1e-6, 60.0, 300)])


def _sigmoid(x: float) -> D:
    return 1 / (1 + (-D(x)).exp())


def _gelu_tanh(x: float) -> D:
    y = 2 * (2 / D(math.pi)).sqrt() * (D(x) + D("0.044715") * D(x) ** 3)
    return D(x) / (1 + (-y).exp())


DEFINITIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: float(D(x) * _sigmoid(x)),
    "sigmoid": lambda x: float(_sigmoid(x)),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: float(_gelu_tanh(x)),
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 2e-5)])
def test_an_activation_is_its_definition_to_a_small_relative_error(name: str, dtype: type, tolerance: float) -> None:
    decimal.getcontext().prec = 60
    gates = GATES.astype(dtype)
    expected = np.array([DEFINITIONS[name](float(x)) for x in gates])
    normal = (np.abs(expected) > np.finfo(dtype).tiny) | (expected == 0)
    gates, expected = gates[normal], expected[normal]
    actual = ACTIVATIONS[name](gates)
    assert actual.dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_limits_of_an_activation(name: str, dtype: type) -> None:
    with np.errstate(all="ignore"):
        left, right, lowest, nan = ACTIVATIONS[name](np.array([-np.inf, np.inf, np.finfo(dtype).min, np.nan], dtype))
    assert left == 0 and lowest == 0 and np.isnan(nan)
    assert right == (1 if name == "sigmoid" else np.inf)


@pytest.mark.parametrize("name", NAMES)
def test_the_slope_that_carries_errors_is_the_steepest(name: str) -> None:
    x = np.linspace(-10, 10, 200_001)
    slope = np.abs(np.gradient(ACTIVATIONS[name](x), x)).max()
    assert 0.97 * MAX_SLOPE[name] <= slope <= 1.0001 * MAX_SLOPE[name]


def test_the_activation_is_a_part_of_a_problem_and_of_its_words() -> None:
    (problem,) = problems([(4, 8, 16)], ["float32"], ["kn"], "gelu_tanh")
    assert problem.activation == "gelu_tanh"
    assert "--activation gelu_tanh" in problem.options and "gelu_tanh" in str(problem)
    assert "activation" not in Problem(4, 8, 16, "float32").options
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh, relu, sigmoid"):
        Problem(4, 8, 16, "float32", activation="swish")
