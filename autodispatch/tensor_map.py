"""Tensor maps: the driver's description of a matrix and of the box that one TMA copy moves, as a kernel argument.

Encoding one takes several microseconds, so maps are cached by all that they encode: address, shape, strides, type, box.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from autodispatch import driver
from autodispatch.errors import LaunchError
from autodispatch.problem import ITEM_BYTES

_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by the span in bytes
_L2_PROMOTION_128 = 2  # a whole line at a time; twice that costs up to 5 % where the weights are streamed


@lru_cache(maxsize=1)
def _encode() -> Any:
    function = driver.library().cuTensorMapEncodeTiled
    p, i, u = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    function.argtypes = [p, i, u, p, p, p, p, p, i, i, i, i]
    return function


@lru_cache(maxsize=8192)
def tensor_map(
    pointer: int,
    rows: int,
    columns: int,
    row_stride: int,
    dtype: str,
    box_rows: int,
    box_columns: int,
    swizzle: int,
) -> Any:
    """The map of a row-major matrix of `rows` x `columns` elements, moved in boxes of `box_rows` x `box_columns`.

    `row_stride` counts elements and, like the address, must be a multiple of 16 bytes; `swizzle` is 0, 32, 64 or 128
    bytes. What a box holds outside the matrix reads as zero and is not written. Raises LaunchError.
    """
    buffer = np.zeros(_BYTES + _ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT
    item = ITEM_BYTES[dtype]
    sizes = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(row_stride * item)
    box = (ctypes.c_uint32 * 2)(box_columns, box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    status = _encode()(
        buffer.ctypes.data + offset,
        _DATA_TYPES[dtype],
        2,
        pointer,
        sizes,
        strides,
        box,
        steps,
        0,
        _SWIZZLES[swizzle],
        _L2_PROMOTION_128,
        0,
    )
    if status != 0:
        what = f"{rows} x {columns} {dtype}, row stride {row_stride}, box {box_rows} x {box_columns}, swizzle {swizzle}"
        raise LaunchError(f"cuTensorMapEncodeTiled must return 0 (got CUresult {status} for {what})")
    return buffer[offset : offset + _BYTES].view(f"V{_BYTES}")
