"""Problem and the checks on a call's arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodispatch.arrays import NumpyFamily, operands, planned, settle
from autodispatch.problem import (
    Matrix,
    Operands,
    Problem,
    alignment,
    canonical,
    check_overlap,
    check_shapes,
    log2_distance,
    row_major,
    weight_layout,
)

FAMILY = NumpyFamily()


def matrix(array: np.ndarray) -> Matrix:
    return FAMILY.matrix("x", array)


def test_a_problem_refuses_what_no_kernel_knows_and_names_the_field() -> None:
    for field, value in (
        ("m", -1),
        ("dtype", "float64"),
        ("layout", "mn"),
        ("activation", "tanh"),
        ("precision", "fp8"),
        ("math", "loose"),
        ("alignment", 3),
    ):
        with pytest.raises(ValueError, match=field):
            Problem(**{"m": 1, "n": 1, "k": 1, "dtype": "float16", field: value})


def test_a_problem_counts_its_work() -> None:
    problem = Problem(2, 3, 5, "float16")
    assert problem.flops == 2 * 2 * (2 * 3 * 5)
    assert problem.bytes_moved == 2 * (2 * 5 + 2 * 3 * 5 + 2 * 3)
    assert str(Problem(2, 3, 5, "bfloat16", "nk", 8, math="fast")) == "2,3,5 bfloat16 nk fast align8"


def test_the_layout_follows_the_axis_with_unit_stride() -> None:
    w = np.zeros((5, 7), np.float32)
    assert weight_layout(matrix(w)) == "kn"
    assert weight_layout(matrix(w.T)) == "nk"
    assert weight_layout(matrix(np.zeros((5, 14), np.float32)[:, 7:])) == "kn"
    assert weight_layout(matrix(w[:, ::2])) is None
    assert weight_layout(matrix(w[::-1])) is None
    assert weight_layout(matrix(np.broadcast_to(w[:1], (5, 7)))) is None


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_row_major_means_that_rows_can_be_read_as_pointer_plus_leading_dimension(
    r: int, c: int, sr: int, sc: int
) -> None:
    x = Matrix(0, r, c, sr, sc, "float16", None, None)
    if row_major(x):
        y = canonical(x)
        addresses = [(i * sr + j * sc) for i in range(r) for j in range(c)]
        assert addresses == [i * y.row_stride + j for i in range(r) for j in range(c)]


def test_alignment_is_the_largest_power_of_two_that_divides_pointers_and_rows() -> None:
    def of(pointer: int, row_stride: int, rows: int = 4) -> int:
        x = canonical(Matrix(pointer, rows, 8, row_stride, 1, "float16", None, None))
        return alignment(Operands(x, x, x, x))

    assert of(256, 64) == 16
    assert of(2, 64) == 2
    assert of(256, 33) == 2
    assert of(256, 34) == 4
    assert of(264, 64) == 8
    assert of(256, 33, rows=1) == 16  # the stride of a single row does not matter


def test_the_planned_operands_are_those_that_the_copies_make() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 15)).astype(np.float32)
    a, b1, b2, out = x[::2, ::3], x[:5, ::2], x.T[:5, 4:12], np.zeros((6, 8), np.float32)
    arguments = [matrix(y) for y in (a, b1, b2, out)]
    settlement = settle(*arguments)
    assert {name for name, _ in settlement.copied} == {"a", "b1"}
    assert settlement.layout == "nk"
    before = planned(*arguments, settlement)
    after = operands(FAMILY, *arguments, settlement)
    for expected, made in zip(before, after, strict=True):
        assert expected.key[:-1] == made.key[:-1]
    np.testing.assert_array_equal(after.b1.array, b1)


def test_shapes_that_do_not_fit_name_the_argument() -> None:
    def m(rows: int, columns: int, dtype: str = "float32", device: int | None = None) -> Matrix:
        return Matrix(0, rows, columns, columns, 1, dtype, device, None)

    check_shapes(m(2, 3), m(3, 4), m(3, 4), m(2, 4))
    for arguments, error, words in (
        ((m(2, 3), m(2, 4), m(3, 4), None), ValueError, r"b1 must have as many rows as a has columns, 3 \(got"),
        ((m(2, 3), m(3, 4), m(3, 5), None), ValueError, r"b2 must have the shape of b1, \(3, 4\) \(got \(3, 5\)\)"),
        ((m(2, 3), m(3, 4), m(3, 4), m(3, 4)), ValueError, r"out must have shape \(2, 4\)"),
        ((m(2, 3), m(3, 4, "float16"), m(3, 4), None), TypeError, "b1 must have the dtype of a, float32"),
        ((m(2, 3), m(3, 4), m(3, 4, device=1), None), ValueError, "b2 must be on the device of a, the CPU"),
    ):
        with pytest.raises(error, match=words):
            check_shapes(*arguments)


def test_overlap_is_decided_exactly() -> None:
    x = np.zeros((8, 16), np.float32)
    out = matrix(x[:, 8:])
    check_overlap(out, (("a", matrix(x[:, :8])),))
    check_overlap(matrix(x[::2]), (("a", matrix(x[1::2])),))
    for view in (x[:, 7:15], x[3:4], x.T):
        with pytest.raises(ValueError, match="out must not overlap b1"):
            check_overlap(out, (("a", matrix(x[:0])), ("b1", matrix(view))))


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (4, 1)])
def test_out_that_overlaps_itself_is_refused(strides: tuple[int, int]) -> None:
    out = Matrix(0, 3, 8, *strides, "float32", None, None)
    a = Matrix(0, 3, 2, 2, 1, "float32", None, None)
    b = Matrix(0, 2, 8, 8, 1, "float32", None, None)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        check_shapes(a, b, b, out)


def test_distance_counts_doublings() -> None:
    assert log2_distance(64, 64) == 0
    assert log2_distance(64, 128) == log2_distance(128, 64) == 1
    assert log2_distance(8, 2048) == 8
