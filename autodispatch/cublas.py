"""Matrix products by cuBLAS, called through ctypes.

CuPy's own binding refuses every call while a stream is captured into a CUDA graph, and its handle shares one workspace
between streams. Here the caller brings the workspace with each call, so that calls can be captured, and calls on two
streams can overlap.
"""

from __future__ import annotations

import ctypes
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
    from cuda import pathfinder

    lib = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
    p, i, sz = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    lib.cublasCreate_v2.argtypes = [ctypes.POINTER(p)]
    lib.cublasSetStream_v2.argtypes = [p, p]
    lib.cublasSetWorkspace_v2.argtypes = [p, p, sz]
    lib.cublasSetMathMode.argtypes = [p, i]
    lib.cublasGemmEx.argtypes = [p, i, i, i, i, i, p, p, i, i, p, i, i, p, p, i, i, i, i]
    return lib


_handles: dict[tuple[int, int], Any] = {}
_lock = threading.Lock()


def workspace_bytes(device: DeviceInfo) -> int:
    """The scratch memory that NVIDIA recommends for a handle: 32 MiB from compute capability 9.0, 4 MiB below it."""
    return (32 << 20) if device.compute_capability >= (9, 0) else (4 << 20)


def handle(device: DeviceInfo) -> Any:
    """The handle of this device and thread (two threads must not share one); made on the current device."""
    assert device.index is not None
    key = (device.index, threading.get_ident())
    found = _handles.get(key)
    if found is None:
        lib = _library()
        found = ctypes.c_void_p()
        _check("cublasCreate", lib.cublasCreate_v2(ctypes.byref(found)))
        _check("cublasSetMathMode", lib.cublasSetMathMode(found, _DISALLOW_REDUCED_PRECISION_REDUCTION))
        with _lock:
            _handles[key] = found
    return found


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
    status = lib.cublasGemmEx(
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
