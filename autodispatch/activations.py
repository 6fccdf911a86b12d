"""The activations of the gate, as NumPy functions: what the CPU variants compute and the kernels are checked against.

Each takes float32 or float64 arrays, of NumPy or CuPy, and returns the type it was given. -inf gives the limit 0, NaN
stays NaN. The kernels' forms are in kernels/include/autodispatch/activation.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _times_sigmoid(1, x)


def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    x = _finite(x)
    return _times_sigmoid(x, x)


def gelu_tanh(x: Any) -> Any:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    x = _finite(x)
    y = 2 * (2 / math.pi) ** 0.5 * x * (1 + 0.044715 * x * x)
    return _times_sigmoid(x, _finite(y))


def gelu(x: Any) -> Any:
    """x * P(X <= x) of the normal distribution."""
    x = _finite(x)
    t = np.abs(x) * 0.5**0.5
    h = np.exp(-0.5 * t * t)
    tail = 0.5 * _scaled_erfc(t)
    return np.where(x < 0, (x * h) * tail * h, x * (1 - tail * h * h)).astype(x.dtype)


def relu(x: Any) -> Any:
    """The larger of x and 0."""
    return np.maximum(x, 0)


def _finite(x: Any) -> Any:
    return np.where(x == -np.inf, np.finfo(x.dtype).min, x)


def _times_sigmoid(x: Any, y: Any) -> Any:
    """x / (1 + exp(-y)), without overflow and accurate in both tails."""
    h = np.exp(-0.5 * np.abs(y))
    return np.where(y < 0, x * h * h, x) / (1 + h * h)


@cache
def _erfc_series() -> tuple[float, ...]:
    """Chebyshev coefficients of exp(t^2) * erfc(t) in s = 2 / (2 + t) on (0, 1]; relative error below 1e-14."""

    def scaled(t: float) -> float:
        if t < 20:
            return math.exp(t * t) * math.erfc(t)
        inverse = 0.5 / (t * t)  # the asymptotic series
        series = 1 - inverse * (1 - 3 * inverse * (1 - 5 * inverse))
        return float(series / (t * math.pi**0.5))

    def by_s(s: Any) -> Any:
        return np.array([scaled(2 / v - 2) / v for v in np.atleast_1d(s)])

    return tuple(np.polynomial.Chebyshev.interpolate(by_s, 40, domain=[1e-12, 1]).coef.tolist())


def _scaled_erfc(t: Any) -> Any:
    """exp(t^2) * erfc(t) for t >= 0, in float64, by Clenshaw's recurrence."""
    s = 2 / (2 + t.astype(np.float64))
    u, first, second = 4 * s - 2, 0.0 * s, 0.0 * s
    series = _erfc_series()
    for coefficient in reversed(series[1:]):
        first, second = coefficient + u * first - second, first
    return s * (series[0] + 0.5 * u * first - second)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {f.__name__: f for f in (silu, gelu, gelu_tanh, relu, sigmoid)}

# relative errors that the kernels' forms, and float32 here, stay below; see tests/gpu/test_activations.py
MAX_ERROR = {"silu": 2.0**-17, "gelu": 2.0**-15, "gelu_tanh": 2.0**-14, "relu": 0.0, "sigmoid": 2.0**-17}
MAX_ERROR_EXACT_FLOAT = {**MAX_ERROR, "silu": 2.0**-20, "sigmoid": 2.0**-20, "gelu": 2.0**-20}
MAX_SLOPE = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "relu": 1.0, "sigmoid": 0.25}
