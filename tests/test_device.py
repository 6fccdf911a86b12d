"""Which device is it: identity by what CUDA reports, NVML by UUID only, nothing that breaks where either is absent."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autodispatch import device
from autodispatch import nvml as nvml_module
from autodispatch.device import from_cuda, mig_profile, normalised_name, uuid_text
from autodispatch.nvml import Nvml
from tests.fakes import H200, like

UUID = bytes(range(16))
UUID_TEXT = "00010203-0405-0607-0809-0a0b0c0d0e0f"


def properties(**changes: Any) -> dict[str, Any]:
    values = {
        "name": b"NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 132,
        "totalGlobalMem": 150_000_000_000,
        "uuid": UUID,
    }
    return values | changes


def test_a_device_is_what_cuda_reports() -> None:
    attributes = {"L2CacheSize": 60 << 20, "MaxSharedMemoryPerBlockOptin": 232448, "ClockRate": 1_980_000}
    attributes |= {"MemoryClockRate": 3_201_000, "GlobalMemoryBusWidth": 6144}
    found = from_cuda(0, properties(), attributes, (13, 0))
    assert found.name == "H200"
    assert found.identity == {
        "kind": "cuda",
        "name": "H200",
        "compute_capability": "9.0",
        "sm_count": 132,
        "memory_gib": 140,
        "mig_profile": "",
    }
    assert found.key == "h200-sm90-132x-140gib"
    assert found.bandwidth == pytest.approx(4.9e12, rel=0.01)
    assert found.uuid == UUID_TEXT


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("GeForce RTX 3090", "GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
        ("NVIDIA NVIDIA RTX A6000 ", "RTX A6000"),
        ("Orin (nvgpu)", "Orin (nvgpu)"),
        (b"NVIDIA A100\0", "A100"),
        ("  Tesla   T4  ", "Tesla T4"),
    ],
)
def test_names_are_normalised_and_not_shortened(name: Any, expected: str) -> None:
    assert normalised_name(name) == expected


def test_near_names_stay_different_devices() -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA H200 NVL"]
    assert len({from_cuda(0, properties(name=n), {}, (13, 0)).key for n in names}) == 4
    more = from_cuda(0, properties(totalGlobalMem=85_000_000_000), {}, (13, 0))
    fewer = from_cuda(0, properties(multiProcessorCount=114), {}, (13, 0))
    assert len({H200.key, more.key, fewer.key}) == 3


def test_keys_are_safe_as_file_names() -> None:
    key = like(H200, name='../O\'Rin "x"; DROP TABLE/nvgpu').key
    assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")
    assert "/" not in key


def test_a_mig_slice_is_not_its_gpu() -> None:
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert mig_profile(normalised_name(name)) == "1g.5gb"
    slice_ = from_cuda(0, properties(name=name, multiProcessorCount=14, totalGlobalMem=5 << 30), {}, (13, 0))
    whole = from_cuda(0, properties(name="NVIDIA A100-SXM4-40GB", multiProcessorCount=108), {}, (13, 0))
    assert slice_.mig_profile == "1g.5gb"
    assert slice_.key != whole.key


class FakeNvml:
    """Two unlike GPUs behind UUIDs, in an order that is not CUDA's."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.clocks = {f"GPU-{UUID_TEXT}": 1980, "GPU-other": 300, "MIG-slice": 1000}

    def _maybe_fail(self, where: str) -> None:
        if self.fails == where:
            raise self.NVMLError("Driver/library version mismatch")

    def nvmlInit(self) -> None:  # noqa: N802
        self._maybe_fail("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.clocks:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        raise AssertionError("NVML's index is not CUDA's")

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        self._maybe_fail("read")
        return self.clocks[handle]

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        return 40


def test_nvml_is_asked_by_uuid_and_never_by_index() -> None:
    reading = Nvml(UUID_TEXT, FakeNvml()).read()
    assert reading is not None
    assert (reading.sm_clock_mhz, reading.temperature_c) == (1980, 40)
    assert Nvml("ffff", FakeNvml()).read() is None
    assert Nvml("", FakeNvml()).read() is None


def test_a_mig_slice_is_found_by_its_own_uuid() -> None:
    reading = Nvml("slice", FakeNvml()).read()
    assert reading is not None
    assert reading.sm_clock_mhz == 1000


@pytest.mark.parametrize("fails", ["init", "read"])
def test_a_broken_nvml_costs_one_warning(fails: str, warnings_logged: pytest.LogCaptureFixture) -> None:
    nvml_module._warn_once.cache_clear()
    for _ in range(2):
        nvml = Nvml(UUID_TEXT, FakeNvml(fails))
        assert nvml.read() is None
        assert nvml.read() is None
    assert [r.getMessage().startswith("NVML cannot be read") for r in warnings_logged.records] == [True]


def test_uuids_have_the_form_that_nvml_prints() -> None:
    assert uuid_text(UUID) == UUID_TEXT
    assert uuid_text(b"") == ""


def test_the_processor_is_a_device() -> None:
    cpu = device.cpu_device()
    assert cpu.kind == "cpu"
    assert cpu.sm_count >= 1
    assert device.environment(cpu)["numpy"]


def test_two_cupy_packages_are_named_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    def installed(*names: str) -> None:
        found = [SimpleNamespace(metadata={"Name": n}) for n in names]
        monkeypatch.setattr(metadata, "distributions", lambda: iter(found))
        device.warn_of_two_cupys.cache_clear()
        device.warn_of_two_cupys()
        device.warn_of_two_cupys()

    installed("numpy", "cupy-cuda13x", "cupyx-something")
    assert not warnings_logged.records
    installed("cupy-cuda12x", "cupy-cuda13x")
    (record,) = warnings_logged.records
    assert "cupy-cuda12x, cupy-cuda13x" in record.getMessage()
    device.warn_of_two_cupys.cache_clear()


def test_no_extra_but_the_cuda_ones_brings_a_cupy() -> None:
    for requirement in metadata.requires("autodispatch") or []:
        if "cupy" in requirement:
            assert 'extra == "cuda1' in requirement


BROKEN_CUPY = {
    "absent": None,
    "import error": "raise ImportError('libcuda.so.1: cannot open shared object file')",
    "runtime error": "raise RuntimeError('driver too old')",
    "no device": """
class _Runtime:
    def getDeviceCount(self): raise RuntimeError('cudaErrorNoDevice')
    def getDevice(self): raise RuntimeError('cudaErrorNoDevice')
class cuda:
    runtime = _Runtime()
""",
}


@pytest.mark.parametrize("cupy", BROKEN_CUPY.values(), ids=BROKEN_CUPY.keys())
def test_everything_but_a_gpu_call_works_without_a_gpu(tmp_path: Path, cupy: str | None) -> None:
    (tmp_path / "cupy.py").write_text(cupy if cupy is not None else "raise ModuleNotFoundError('cupy')")
    script = """
import numpy as np
import autodispatch
from autodispatch.device import default_device
from autodispatch import dispatcher
assert default_device().kind == "cpu"
x = np.ones((2, 2), np.float32)
print(dispatcher.run(x, x, x)[0, 0])
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "MIG-377e"}
    cli = ("-m", "autodispatch")
    tune = (*cli, "tune", "8,8,8", "--device", "cuda:0")
    several = [("-c", script), (*cli, "list"), (*cli, "info"), (*cli, "explain", "8,8,8"), tune]
    running = [
        subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for words in several
    ]
    outputs = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0, 0, 1], outputs
    assert float(outputs[0][0]) == pytest.approx(3.523188)
    assert "DeviceError" in outputs[-1][1]


def test_how_busy_a_device_is_is_known_where_nvml_tells() -> None:
    class Busy(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
            return SimpleNamespace(gpu=37, memory=1)

    assert Nvml(UUID_TEXT, Busy()).busy_percent() == 37
    assert Nvml(UUID_TEXT, FakeNvml()).busy_percent() is None
    assert Nvml("ffff", Busy()).busy_percent() is None
