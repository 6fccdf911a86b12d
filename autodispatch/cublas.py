"""Matrix products by cuBLAS, called through ctypes.

CuPy's own binding refuses every call while a stream is captured into a CUDA graph, and its handle shares one workspace
between streams. Here the caller brings the workspace with each call, so that calls can be captured, and calls on two
streams can overlap.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import lru_cache
from typing import Any

from autodispatch.device import DeviceInfo
from autodispatch.errors import LaunchError
from autodispatch.problem import Matrix

_OP_N, _OP_T = 0, 1  # cublasOperation_t
_DATA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32 = 68, 77  # cublasComputeType_t
_GEMM_DEFAULT = -1  # cublasGemmAlgo_t
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16  # cublasMath_t

_ONE = ctypes.c_float(1.0)
_ZERO = ctypes.c_float(0.0)


@lru_cache(maxsize=1)
def _library() -> Any:
    """cuBLAS 12 or newer. Raises LaunchError if it cannot be loaded."""
    try:
        from cuda import pathfinder

        lib = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
        gemm = lib.cublasGemmEx_64  # 64-bit sizes and strides
    except Exception as cause:
        raise LaunchError(f"cuBLAS 12 or newer must be loadable (got {type(cause).__name__}: {cause})") from cause
    p, i, n = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.cublasCreate_v2.argtypes = [ctypes.POINTER(p)]
    lib.cublasDestroy_v2.argtypes = [p]
    lib.cublasSetStream_v2.argtypes = [p, p]
    lib.cublasSetWorkspace_v2.argtypes = [p, p, ctypes.c_size_t]
    lib.cublasSetMathMode.argtypes = [p, i]
    gemm.argtypes = [p, i, i, n, n, n, p, p, i, n, p, i, n, p, p, i, n, i, i]
    return lib


class _Handle:
    """A cuBLAS handle, given back when its thread ends."""

    def __init__(self) -> None:
        self.value = ctypes.c_void_p()
        lib = _library()
        _check("cublasCreate", lib.cublasCreate_v2(ctypes.byref(self.value)))
        _check("cublasSetMathMode", lib.cublasSetMathMode(self.value, _DISALLOW_REDUCED_PRECISION_REDUCTION))

    def __del__(self) -> None:
        if self.value and not sys.is_finalizing():
            _library().cublasDestroy_v2(self.value)


_of_this_thread = threading.local()  # two threads must not share a handle


def workspace_bytes(device: DeviceInfo) -> int:
    """The scratch memory that NVIDIA recommends for a handle: 32 MiB from compute capability 9.0, 4 MiB below it."""
    return (32 << 20) if device.compute_capability >= (9, 0) else (4 << 20)


def has_handle(device: DeviceInfo) -> bool:
    """Whether this thread has a handle for the device already; making one would spoil a stream capture."""
    return device.index in getattr(_of_this_thread, "handles", {})


def handle(device: DeviceInfo) -> Any:
    """The handle of this device and thread; made on the current device. Raises LaunchError."""
    if not hasattr(_of_this_thread, "handles"):
        _of_this_thread.handles = {}
    handles: dict[int | None, _Handle] = _of_this_thread.handles
    if device.index not in handles:
        handles[device.index] = _Handle()
    return handles[device.index].value


def product(
    device: DeviceInfo,
    stream: int,
    workspace: int,
    a: Matrix,
    b: Matrix,
    layout: str,
    c_pointer: int,
    c_dtype: str,
    ldc: int,
    *,
    tf32: bool = False,
) -> None:
    """c = a @ b with fp32 accumulation. a is (m, k) row-major; b is stored (k, n) for `kn`, (n, k) for `nk`; c is
    (m, n) row-major with leading dimension `ldc`; `workspace` is the address of `workspace_bytes(device)` bytes,
    aligned to 256. The device must be current.

    Raises LaunchError if cuBLAS refuses.
    """
    m, k = a.rows, a.columns
    n = b.columns if layout == "kn" else b.rows
    lib, own = _library(), handle(device)
    _check("cublasSetStream", lib.cublasSetStream_v2(own, stream))  # this resets the workspace
    _check("cublasSetWorkspace", lib.cublasSetWorkspace_v2(own, workspace, workspace_bytes(device)))
    # cuBLAS is column-major: it computes the transpose of c out of the transposes of b and a
    status = lib.cublasGemmEx_64(
        own,
        _OP_N if layout == "kn" else _OP_T,
        _OP_N,
        n,
        m,
        k,
        ctypes.addressof(_ONE),
        b.pointer,
        _DATA_TYPES[b.dtype],
        b.row_stride,
        a.pointer,
        _DATA_TYPES[a.dtype],
        a.row_stride,
        ctypes.addressof(_ZERO),
        c_pointer,
        _DATA_TYPES[c_dtype],
        ldc,
        _COMPUTE_32F_FAST_TF32 if tf32 else _COMPUTE_32F,
        _GEMM_DEFAULT,
    )
    _check("cublasGemmEx", status)


def _check(name: str, status: int) -> None:
    if status != 0:
        raise LaunchError(f"{name} must return 0 (got cublasStatus_t {status})")
