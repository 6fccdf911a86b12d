"""The CUDA driver's own functions, through ctypes: those that CuPy does not offer, or not as cheaply."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from autodispatch.launch import LaunchConfig

_RELAXED = 2  # CUstreamCaptureMode
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_PROGRAMMATIC_DRIVER = 12030  # from here on also in a graph


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number_of_attributes", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver. Raises OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


@lru_cache(maxsize=1)
def launch_kernel() -> Callable[[int, int, int, None], int]:
    """`cuLaunchKernelEx`: takes the three addresses of a PackedLaunch and None, returns a CUresult."""
    function = library().cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def has_programmatic_launch() -> bool:
    """Whether the driver lets a grid begin before the one before it in the stream has ended."""
    version = ctypes.c_int(0)
    library().cuDriverGetVersion(ctypes.byref(version))
    return version.value >= _PROGRAMMATIC_DRIVER


class PackedLaunch:
    """A launch with all that it needs in memory of its own, which the driver only reads: it can be repeated, also by
    several threads at once.

    Attributes:
        addresses: of the configuration, the function and the arguments, as `launch_kernel` takes them.
    """

    __slots__ = ("_kept", "addresses")

    def __init__(self, function: int, launch: LaunchConfig, arguments: Sequence[Any], stream: int) -> None:
        values = [np.array(x) for x in arguments]
        config = _Config((*launch.grid, 1), (launch.threads, 1, 1), launch.shared_bytes, stream, None, 0)
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        if launch.programmatic and has_programmatic_launch():
            config.attributes, config.number_of_attributes = ctypes.addressof(attribute), 1
        pointers = (ctypes.c_void_p * len(values))(*(x.ctypes.data for x in values))
        self._kept = (values, config, attribute, pointers)
        self.addresses = (ctypes.addressof(config), function, ctypes.addressof(pointers))


def relax_capture_mode() -> None:
    """Lets this thread load and allocate while another one captures a graph, without spoiling its capture."""
    mode = ctypes.c_int(_RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
