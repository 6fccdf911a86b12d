"""What is wrong with this installation, and the line that mends it."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autodispatch import device as devices
from autodispatch import exchange, nvml, pruning, resources
from autodispatch.compiler import check_architecture, nvrtc_file
from autodispatch.errors import AutodispatchError
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.variants import VARIANTS, Registry

_OLDEST_CUPY = (14, 2)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is, and what mends it where it is not as it should be."""

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str
    remedy: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Looks at everything; a check that itself goes wrong is a finding, too."""
    found: list[Finding] = []
    for check in (_python, _kernels, _cupy, _gpus, _nvml, lambda: _databases(settings), _seeds):
        try:
            found += check()
        except Exception as cause:
            name = getattr(check, "__name__", "check").strip("_<>")
            found.append(
                Finding(name, "error", f"{type(cause).__name__}: {cause}", "report this with the output above")
            )
    return found


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _kernels() -> Iterator[Finding]:
    """That the kernels' sources were installed along with the package."""
    missing = [s for v in VARIANTS.values() for s in v.sources if not (resources.kernels() / f"{s}.cu").is_file()]
    if missing:
        yield Finding(
            "kernels", "error", f"no {', '.join(missing)} in {resources.kernels()}", "install autodispatch again"
        )
    else:
        yield Finding("kernels", "ok", str(resources.kernels()))


def _cupy() -> Iterator[Finding]:
    packages = devices.cupy_packages()
    if len(packages) > 1:
        line = f"pip uninstall {' '.join(packages)}, then install the one that fits the driver"
        yield Finding("cupy", "error", f"several overwrite each other: {', '.join(packages)}", line)
        return
    try:
        cupy = devices.import_cupy()
    except AutodispatchError as cause:
        yield Finding(
            "cupy", "warning", str(cause), "pip install 'autodispatch[cuda13]' (or cuda12); not needed on the CPU"
        )
        return
    version = tuple(int(x) for x in cupy.__version__.split(".")[:2])
    if version < _OLDEST_CUPY:
        yield Finding("cupy", "error", f"{cupy.__version__} is too old", "pip install --upgrade 'cupy-cuda13x>=14.2'")
    else:
        yield Finding("cupy", "ok", cupy.__version__)


def _gpus() -> Iterator[Finding]:
    count = devices.cuda_count()
    if count == 0:
        line = "if there should be one: nvidia-smi must list it, and CUDA_VISIBLE_DEVICES must not hide it"
        yield Finding("gpu", "warning", "none is visible; calls with NumPy arrays work", line)
    for index in range(count):
        device = devices.cuda_device(index)
        try:
            check_architecture(device, devices.import_cupy().cuda.nvrtc.getSupportedArchs())
        except AutodispatchError as cause:
            yield Finding(f"gpu {index}", "error", str(cause), "install the CuPy extra of a newer CUDA version")
            continue
        nvrtc = "{}.{}".format(*device.nvrtc_version)
        if device.compute_capability == (9, 0) and device.nvrtc_version < (12, 9):
            detail = f"{device.name}: NVRTC {nvrtc} ({nvrtc_file()}) is too old for the Hopper kernels"
            yield Finding(f"gpu {index}", "warning", detail, "pip install --upgrade nvidia-cuda-nvrtc-cu12")
        else:
            yield Finding(f"gpu {index}", "ok", f"{device.name} ({device.key}), NVRTC {nvrtc}")


def _nvml() -> Iterator[Finding]:
    for index in range(devices.cuda_count()):
        if nvml.Nvml(devices.cuda_device(index).uuid).read() is None:
            detail = "cannot be read, so that records hold no clocks and throttling goes unseen"
            yield Finding(f"nvml of gpu {index}", "warning", detail, "pip install nvidia-ml-py")


def _databases(settings: Settings) -> Iterator[Finding]:
    path = settings.database
    yield _database("your database", path, lambda: _probe(path))
    for other in settings.read_only_databases:
        yield _database(f"database {other}", other, lambda p=other: TuningStore(p, read_only=True).close())  # type: ignore[misc]


def _database(name: str, path: Path, probe: Callable[[], None]) -> Finding:
    try:
        probe()
    except (AutodispatchError, OSError, sqlite3.Error) as cause:
        return Finding(name, "error", str(cause), f"mend it, or set AUTODISPATCH_DB to another path than {path}")
    return Finding(name, "ok", str(path) if path.is_file() else f"{path} (not there yet)")


def _probe(path: Path) -> None:
    """Raises if the database cannot be read or written, or is damaged; makes nothing that is not there."""
    folder = next(p for p in (path.parent, *path.parents) if p.is_dir())
    if not path.is_file():
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} must be writable")
        return
    with sqlite3.connect(path) as connection:
        answer = connection.execute("PRAGMA quick_check").fetchone()[0]
    connection.close()
    if answer != "ok":
        raise sqlite3.DatabaseError(f"{path} is damaged ({answer})")
    TuningStore(path, read_only=True).close()
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        raise PermissionError(f"{path} and its folder must be writable")


def _seeds() -> Iterator[Finding]:
    """Shipped records whose kernels have changed serve nobody."""
    for path in resources.seeds():
        store = exchange.load_seeds([path])
        stale = sorted({r.variant for r in pruning.select(store, pruning.Criteria(is_stale=True), Registry())})
        store.close()
        if stale:
            detail = f"{path.name}: {', '.join(stale)} changed since it was tuned"
            yield Finding("shipped records", "warning", detail, "tune on this machine: autodispatch tune --help")
        else:
            yield Finding("shipped records", "ok", path.name)
