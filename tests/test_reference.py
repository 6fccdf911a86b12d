"""The check must pass what is right to the last rounding, and fail everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autodispatch.activations import silu
from autodispatch.device import cpu_device
from autodispatch.problem import Problem
from autodispatch.reference import Checker, GuardedOutput, compare, decode, encode, make_inputs, reference

DTYPES = ("float32", "float16", "bfloat16")
CPU = cpu_device()


def problem_and_truth(dtype: str, k: int = 96) -> tuple[Problem, Any, Any, Any]:
    problem = Problem(40, 56, k, dtype)
    inputs = make_inputs(problem, CPU, seed=5)
    return problem, inputs, *reference(inputs.a, inputs.b1, inputs.b2, problem)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_true_value_rounded_once_passes(dtype: str) -> None:
    _, _, expected, tolerance = problem_and_truth(dtype)
    rounded = decode(encode(expected.astype(np.float32), dtype))
    check = compare(np, rounded, expected, tolerance, dtype)
    assert check.status == "ok"
    assert check.relative_error < {"float32": 1e-7, "float16": 4e-4, "bfloat16": 3e-3}[dtype]


def test_intermediates_rounded_to_bfloat16_fail_unless_the_caller_allowed_them() -> None:
    problem, inputs, expected, tolerance = problem_and_truth("bfloat16")
    gate, up = (decode(inputs.a) @ decode(b) for b in (inputs.b1, inputs.b2))
    twice = silu(decode(encode(gate.astype(np.float32), "bfloat16"))) * decode(
        encode(up.astype(np.float32), "bfloat16")
    )
    actual = decode(encode(twice.astype(np.float32), "bfloat16"))
    assert compare(np, actual, expected, tolerance, "bfloat16").status == "wrong_result"
    allowed = Problem(problem.m, problem.n, problem.k, "bfloat16", math="fast")
    expected, tolerance = reference(inputs.a, inputs.b1, inputs.b2, allowed)
    assert compare(np, actual, expected, tolerance, "bfloat16").status == "ok"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mistake", ["one element", "k short", "swapped", "sign", "nan", "unwritten"])
def test_mistakes_are_found(dtype: str, mistake: str) -> None:
    _, inputs, expected, tolerance = problem_and_truth(dtype)
    a, b1, b2 = decode(inputs.a), decode(inputs.b1), decode(inputs.b2)
    actual = expected.copy()
    if mistake == "one element":
        actual[7, 9] *= 1.02
    elif mistake == "k short":
        actual = silu(a[:, :-1] @ b1[:-1]) * (a[:, :-1] @ b2[:-1])
    elif mistake == "swapped":
        actual = silu(a @ b2) * (a @ b1)
    elif mistake == "sign":
        actual[0] = -actual[0]
    elif mistake == "nan":
        actual[3, 3] = np.nan
    else:
        actual[-1, -1] = decode(np.frombuffer(b"\xff" * 4, np.float32))[0]
    assert compare(np, actual, expected, tolerance, dtype).status == "wrong_result"


def test_the_reason_names_the_first_wrong_element() -> None:
    _, _, expected, tolerance = problem_and_truth("float32")
    actual = expected.copy()
    actual[2, 5] += 1
    reason = compare(np, actual, expected, tolerance, "float32").reason
    assert "1 of 2240 elements" in reason
    assert "the first at (2, 5)" in reason


def test_nan_and_infinity_must_be_where_the_reference_has_them() -> None:
    expected = np.array([[np.nan, np.inf, 1e5, -1e5, 1.0]])
    tolerance = np.array([[np.nan, np.nan, 50.0, 50.0, 1e-3]])
    right = np.array([[np.nan, np.inf, np.inf, -np.inf, 1.0]])
    assert compare(np, right, expected, tolerance, "float16").status == "ok"
    for column, value in ((0, 0.0), (1, -np.inf), (1, 65504.0), (2, -np.inf), (3, np.inf), (4, np.inf), (4, np.nan)):
        wrong = right.copy()
        wrong[0, column] = value
        assert compare(np, wrong, expected, tolerance, "float16").status == "wrong_result", (column, value)


def test_silu_takes_its_limits_and_keeps_its_tail() -> None:
    x = np.array([-np.inf, -1e30, -1000.0, -100.0, 0.0, np.inf, np.nan])
    with np.errstate(all="ignore"):
        y = silu(x)
    assert y[:3].tolist() == [0.0, 0.0, 0.0] or np.allclose(y[:3], 0, atol=1e-300)
    assert y[3] == pytest.approx(-100 * np.exp(-100.0), rel=1e-12)
    assert (y[4], y[5]) == (0.0, np.inf)
    assert np.isnan(y[6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("alignment", [4, 8, 16])
def test_inputs_have_exactly_the_problems_layout_and_alignment(dtype: str, layout: str, alignment: int) -> None:
    from autodispatch.arrays import NumpyFamily, describe

    problem = Problem(9, 21, 13, dtype, layout, alignment)
    inputs = make_inputs(problem, CPU)
    family = NumpyFamily()
    output = GuardedOutput(np, problem)
    matrices = [family.matrix(n, x) for n, x in (("a", inputs.a), ("b1", inputs.b1), ("b2", inputs.b2))]
    found, settlement = describe(*matrices, family.matrix("out", output.array))
    assert settlement.copied == ()
    assert found.layout == layout
    assert found.alignment == alignment or alignment == 16


def test_inputs_follow_their_seed() -> None:
    problem = Problem(4, 4, 4, "float32")
    one, same, other = (make_inputs(problem, CPU, s) for s in (1, 1, 2))
    assert np.array_equal(one.a, same.a)
    assert not np.array_equal(one.a, other.a)
    assert np.std(make_inputs(Problem(64, 64, 400, "float32"), CPU).b1) == pytest.approx(400**-0.5, rel=0.05)


@pytest.mark.parametrize("where", ["before", "after", "beside", "none"])
def test_a_write_outside_the_output_is_found(where: str) -> None:
    problem = Problem(8, 12, 4, "float16")
    checker = Checker(problem, CPU)
    checker.poison()
    checker.output.array[...] = checker._expected.astype(np.float16)
    flat = checker.output.buffer
    if where == "before":
        flat[checker.output.start - 1] = 0
    elif where == "after":
        flat[-1] = 0
    elif where == "beside":
        flat[checker.output.start + 12] = 0
    assert checker.verdict().status == ("ok" if where == "none" else "out_of_bounds")


def test_output_that_was_not_written_is_wrong() -> None:
    checker = Checker(Problem(8, 12, 4, "float32"), CPU)
    checker.poison()
    assert checker.verdict().status == "wrong_result"


def test_large_results_are_checked_at_both_ends_and_between(monkeypatch: pytest.MonkeyPatch) -> None:
    from autodispatch import reference as module

    monkeypatch.setattr(module, "_MAX_CHECKED", 4096)
    checker = Checker(Problem(1000, 16, 4, "float32"), CPU)
    rows = checker._checked_rows()
    assert rows[0].start == 0
    assert rows[-1].stop == 1000
    assert sum(r.stop - r.start for r in rows) * 16 <= 4096


@pytest.mark.parametrize(("gate", "up", "right"), [(np.inf, 1.0, np.inf), (np.inf, -1.0, -np.inf), (-np.inf, 2.0, 0.0)])
def test_infinite_terms_leave_one_right_value(gate: float, up: float, right: float) -> None:
    problem = Problem(1, 1, 1, "float32")
    one, b1, b2 = (np.array([[x]], np.float32) for x in (1.0, gate, up))
    expected, tolerance = reference(one, b1, b2, problem)
    for value in (0.0, 123.0, np.inf, -np.inf, np.nan):
        status = compare(np, np.array([[value]]), expected, tolerance, "float32").status
        assert (status == "ok") == (value == right), value
