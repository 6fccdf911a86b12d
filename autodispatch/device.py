"""DeviceInfo: what tuning depends on, read from CUDA (and beside it from NVML), or of the CPU."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import tempfile
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from autodispatch.errors import DeviceError
from autodispatch.settings import keep_kernels_in_memory, kernel_cache

_log = logging.getLogger("autodispatch")


@dataclass(frozen=True)
class DeviceInfo:
    """A device by the attributes that tuning and the cost model depend on. Sizes are bytes, clocks kHz.

    `identity` and `key` hold what a record must match: the normalised name, compute capability, SM count, memory in
    GiB and MIG profile. Everything else may differ between two devices of one model.
    """

    kind: str  # "cuda" or "cpu"
    name: str
    compute_capability: tuple[int, int] = (0, 0)
    sm_count: int = 1  # cores, on the CPU
    memory_bytes: int = 0
    mig_profile: str = ""
    l2_bytes: int = 0
    shared_bytes_per_block: int = 0
    shared_bytes_per_sm: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    clock_khz: int = 0
    bandwidth: float = 0.0  # bytes per second, by the memory's clock and bus width
    index: int | None = field(default=None, compare=False)
    uuid: str = field(default="", compare=False)
    nvrtc_version: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def memory_gib(self) -> int:
        return round(self.memory_bytes / 2**30)

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "compute_capability": "{}.{}".format(*self.compute_capability),
            "sm_count": self.sm_count,
            "memory_gib": self.memory_gib,
            "mig_profile": self.mig_profile,
        }

    @property
    def key(self) -> str:
        """The identity as one line of [a-z0-9.-], safe in file names."""
        words = [self.name, "sm{}{}".format(*self.compute_capability), f"{self.sm_count}x", f"{self.memory_gib}gib"]
        words += [f"mig {self.mig_profile}"] if self.mig_profile else []
        return "-".join(re.sub(r"[^a-z0-9.]+", "-", w.lower()).strip("-") for w in words)


def normalised_name(name: str | bytes) -> str:
    """A device name as every source would spell it: text, single blanks, one vendor prefix at most removed."""
    text = name.decode(errors="replace") if isinstance(name, bytes) else name
    text = " ".join(text.replace("\0", " ").split())
    while text.lower().startswith("nvidia "):
        text = text[len("nvidia ") :]
    return text


def mig_profile(name: str) -> str:
    """The slice of a MIG device, which CUDA appends to the name: `1g.5gb` of `A100-SXM4-40GB MIG 1g.5gb`."""
    found = re.search(r"\bMIG\s+(\S+)$", name)
    return found.group(1) if found else ""


def cuda_device(index: int) -> DeviceInfo:
    """The CUDA device of this index, as CUDA itself reports it. Raises DeviceError, also in a process that was forked
    from one that used CUDA."""
    _refuse_after_fork()
    return _cuda_device(index)


_is_forked = False  # from a process that used CUDA through this package
_is_child = False  # of a process that may have used it otherwise
_NOT_INITIALIZED = 3  # cudaErrorInitializationError, of which a child of such a process hears at every call


def _after_fork() -> None:
    global _is_forked, _is_child
    _is_forked, _is_child = _is_forked or _cuda_device.cache_info().currsize > 0, True


def _refuse_after_fork(cause: Exception | None = None) -> None:
    """Raises DeviceError if this process was forked from one that used CUDA, as is known or told by a call's error."""
    if _is_forked or (_is_child and getattr(cause, "status", None) == _NOT_INITIALIZED):
        raise DeviceError(
            "CUDA must be started after a fork (got a process that was forked from one that had used it); start "
            "processes with multiprocessing's method 'spawn' or 'forkserver'"
        ) from cause


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _cuda_device(index: int) -> DeviceInfo:
    cupy = import_cupy()
    try:
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        attributes = cupy.cuda.Device(index).attributes
        nvrtc = cupy.cuda.nvrtc.getVersion()
    except Exception as cause:
        _refuse_after_fork(cause)
        raise DeviceError(f"CUDA device {index} must be usable (got {type(cause).__name__}: {cause})") from cause
    return from_cuda(index, properties, attributes, nvrtc)


def from_cuda(
    index: int, properties: dict[str, Any], attributes: dict[str, int], nvrtc_version: tuple[int, int]
) -> DeviceInfo:
    """DeviceInfo out of what CuPy returns for a device's properties and attributes."""
    name = normalised_name(properties["name"])
    return DeviceInfo(
        kind="cuda",
        name=name,
        compute_capability=(int(properties["major"]), int(properties["minor"])),
        sm_count=int(properties["multiProcessorCount"]),
        memory_bytes=int(properties["totalGlobalMem"]),
        mig_profile=mig_profile(name),
        l2_bytes=int(attributes.get("L2CacheSize", 0)),
        shared_bytes_per_block=int(attributes.get("MaxSharedMemoryPerBlockOptin", 48 << 10)),
        shared_bytes_per_sm=int(attributes.get("MaxSharedMemoryPerMultiprocessor", 64 << 10)),
        registers_per_sm=int(attributes.get("MaxRegistersPerMultiprocessor", 64 << 10)),
        threads_per_sm=int(attributes.get("MaxThreadsPerMultiProcessor", 1024)),
        clock_khz=int(attributes.get("ClockRate", 0)),
        # both edges of the memory clock carry data; the bus width counts bits
        bandwidth=2e3 * attributes.get("MemoryClockRate", 0) * attributes.get("GlobalMemoryBusWidth", 0) / 8,
        index=index,
        uuid=uuid_text(properties.get("uuid", b"")),
        nvrtc_version=nvrtc_version,
    )


def uuid_text(raw: bytes) -> str:
    """The 16 bytes of a UUID in 8-4-4-4-12 form; empty if there are none."""
    digits = bytes(raw)[:16].hex()
    return "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]]) if len(digits) == 32 else ""


@lru_cache(maxsize=1)
def cpu_device() -> DeviceInfo:
    """This machine's processor; its cores stand for SMs."""
    return DeviceInfo(kind="cpu", name=_processor_name(), sm_count=usable_cores(), memory_bytes=_memory_bytes())


def usable_cores() -> int:
    """The processor cores that this process may use, which can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cuda_count() -> int:
    """How many CUDA devices can be used; 0 also where CuPy or the driver is missing or broken. Raises DeviceError in a
    process that was forked from one that used CUDA."""
    _refuse_after_fork()
    try:
        return int(import_cupy().cuda.runtime.getDeviceCount())
    except Exception as cause:
        _refuse_after_fork(cause)
        _log.debug("no CUDA device: %s", cause)
        return 0


def cuda_devices() -> list[DeviceInfo]:
    """Every GPU. Raises DeviceError where there is none."""
    count = cuda_count()
    if count == 0:
        raise DeviceError("there must be a GPU (got none)")
    return [cuda_device(index) for index in range(count)]


def default_device() -> DeviceInfo:
    """The current CUDA device, or the CPU where there is none. Raises DeviceError as `cuda_count` does."""
    if cuda_count() == 0:
        return cpu_device()
    return cuda_device(int(import_cupy().cuda.runtime.getDevice()))


def environment(device: DeviceInfo) -> dict[str, str]:
    """Versions of what a measurement ran on. A field that cannot be read is empty."""
    versions = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "autodispatch": _package_version("autodispatch"),
        "platform": f"{platform.system()}-{platform.machine()}",
        "driver": "",
        "cuda_runtime": "",
        "nvrtc": "",
        "cupy": "",
    }
    if device.kind == "cuda":
        cupy = import_cupy()
        runtime = cupy.cuda.runtime
        versions["driver"] = _cuda_version(runtime.driverGetVersion())
        versions["cuda_runtime"] = _cuda_version(runtime.runtimeGetVersion())
        versions["nvrtc"] = "{}.{}".format(*device.nvrtc_version)
        versions["cupy"] = cupy.__version__
    return versions


def cupy_packages() -> list[str]:
    """The installed CuPy distributions. Two of them share one folder and break each other."""
    names = {d.metadata["Name"] for d in metadata.distributions() if d.metadata["Name"]}
    return sorted(n for n in names if n == "cupy" or re.fullmatch(r"cupy-cuda\d+x|cupy-rocm-.*", n))


@lru_cache(maxsize=1)
def warn_of_two_cupys() -> None:
    """Warns once per process if more than one CuPy distribution is installed."""
    packages = cupy_packages()
    if len(packages) > 1:
        _log.warning("several CuPy packages are installed and overwrite each other: %s; keep one", ", ".join(packages))


def _package_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if found:
            return normalised_name(found.group(1))
    return normalised_name(platform.processor() or platform.machine() or "CPU")


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def import_cupy() -> Any:
    """CuPy, or a DeviceError that keeps the cause. A broken CuPy raises more than ImportError."""
    _check_kernel_cache()
    try:
        import cupy
    except Exception as cause:
        raise DeviceError(
            f"CuPy must be importable to compute on a GPU (got {type(cause).__name__}: {cause}); "
            "install the extra cuda12 or cuda13, whichever the driver supports"
        ) from cause
    return cupy


@lru_cache(maxsize=1)
def _check_kernel_cache() -> None:
    """Sends CuPy's kernel cache to memory, with one warning, where its folder cannot be written.

    CuPy itself fails then: at import if the folder cannot be made, else at the first kernel.
    """
    folder = kernel_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(64 << 10))  # a full disk takes an empty file
            probe.flush()
    except OSError as cause:
        _log.warning("the kernel cache %s cannot be written (%s); kernels are compiled in every process", folder, cause)
        keep_kernels_in_memory()


def on_device(device: int | None) -> contextlib.AbstractContextManager[Any]:
    """Makes a CUDA device current for a block; the caller's device is restored, also after an error."""
    if device is None:
        return contextlib.nullcontext()
    cupy = import_cupy()
    if cupy.cuda.runtime.getDevice() == device:
        return contextlib.nullcontext()
    return cupy.cuda.Device(device)  # type: ignore[no-any-return]


def is_capturing(stream: int) -> bool:
    """Whether a CUDA stream, by its handle, is being captured into a graph."""
    return bool(import_cupy().cuda.runtime.streamIsCapturing(stream))
