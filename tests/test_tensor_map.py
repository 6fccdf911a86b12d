"""Tensor maps: what the driver is asked to encode, and when it need not be asked again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autodispatch import tensor_map as module
from autodispatch.errors import LaunchError
from autodispatch.tensor_map import tensor_map

MATRIX: dict[str, Any] = {
    "pointer": 0x7000,
    "rows": 100,
    "columns": 256,
    "row_stride": 264,
    "dtype": "bfloat16",
    "box_rows": 128,
    "box_columns": 64,
    "swizzle": 128,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What was asked of the driver, which refuses matrices without rows."""
    found: list[dict[str, Any]] = []

    def encode(map_: int, dtype: int, rank: int, pointer: int, *more: Any) -> int:
        sizes, strides, box, steps, interleave, swizzle, promotion, fill = more
        assert map_ % 64 == 0
        found.append(
            {
                "form": (dtype, rank, pointer, interleave, swizzle, promotion, fill),
                "sizes": tuple(sizes),
                "strides": tuple(strides),
                "box": tuple(box),
                "steps": tuple(steps),
            }
        )
        return 0 if sizes[1] else 1

    monkeypatch.setattr(module, "_encode", lambda: encode)
    tensor_map.cache_clear()
    yield found
    tensor_map.cache_clear()


def test_a_map_says_where_the_matrix_lies_and_what_a_copy_moves(asked: list[dict[str, Any]]) -> None:
    found = tensor_map(**MATRIX)
    assert found.nbytes == 128
    (call,) = asked
    assert call["form"] == (9, 2, 0x7000, 0, 3, 2, 0)  # bfloat16, 128-byte swizzle, L2 promotion to 128 bytes
    assert (call["sizes"], call["strides"]) == ((256, 100), (528,))  # columns first, strides in bytes
    assert (call["box"], call["steps"]) == ((64, 128), (1, 1))


def test_a_map_is_encoded_once_for_all_that_it_holds(asked: list[dict[str, Any]]) -> None:
    first = tensor_map(**MATRIX)
    assert tensor_map(**MATRIX) is first and len(asked) == 1
    changes = {
        "pointer": 0x8000,
        "rows": 101,
        "columns": 248,
        "row_stride": 272,
        "dtype": "float16",
        "box_rows": 64,
        "box_columns": 32,
        "swizzle": 64,
    }
    assert set(changes) == set(MATRIX)
    for i, (name, value) in enumerate(changes.items(), start=2):
        tensor_map(**{**MATRIX, name: value})
        assert len(asked) == i, name
    assert len({str(call) for call in asked}) == len(asked)


def test_what_the_driver_refuses_is_an_error_that_names_the_matrix(asked: list[dict[str, Any]]) -> None:
    for _ in range(2):  # and is not kept
        with pytest.raises(LaunchError, match=r"got CUresult 1 for 0 x 256 bfloat16, row stride 264, box 128 x 64"):
            tensor_map(**{**MATRIX, "rows": 0})
    assert len(asked) == 2
