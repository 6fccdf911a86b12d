"""A packed launch is, in memory, what the driver reads: configuration, function and arguments."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autodispatch import driver
from autodispatch.compiler import CompiledKernel, Resources
from autodispatch.device import DeviceInfo
from autodispatch.driver import PackedLaunch, _Config
from autodispatch.launch import LaunchConfig, pointer, size
from autodispatch.problem import Matrix, Operands, Problem
from autodispatch.variants import VARIANTS, Call
from tests.fakes import A100, B200, H200


def test_a_packed_launch_holds_what_the_driver_reads() -> None:
    encoded = np.arange(128, dtype=np.uint8).view("V128")  # as a tensor map
    arguments = (pointer(2**63 + 5), size(-3), encoded, size(2**40))
    packed = PackedLaunch(0x1234, LaunchConfig((7, 5), 96, 4096), arguments, stream=0x77)
    encoded.view(np.uint8)[:] = 0  # the packed one keeps its own
    configuration, function, parameters = packed.addresses
    config = _Config.from_address(configuration)
    assert (list(config.grid), list(config.block)) == ([7, 5, 1], [96, 1, 1])
    assert (config.shared_bytes, config.stream, config.attributes, config.number_of_attributes) == (4096, 0x77, None, 0)
    assert function == 0x1234
    found = (ctypes.c_void_p * 4).from_address(parameters)
    assert ctypes.c_uint64.from_address(found[0]).value == 2**63 + 5
    assert ctypes.c_int64.from_address(found[1]).value == -3
    assert bytes((ctypes.c_uint8 * 128).from_address(found[2])) == bytes(range(128))
    assert ctypes.c_int64.from_address(found[3]).value == 2**40
    assert ctypes.sizeof(_Config) == 56  # of CUlaunchConfig, on 64 bits


@pytest.mark.parametrize(("version", "expected"), [(12020, 0), (12030, 1), (13000, 1)])
def test_a_kernel_that_waits_is_launched_early_where_the_driver_can(
    monkeypatch: pytest.MonkeyPatch, version: int, expected: int
) -> None:
    def get_version(address: Any) -> int:
        address._obj.value = version
        return 0

    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuDriverGetVersion=get_version))
    monkeypatch.setattr(driver, "has_programmatic_launch", driver.has_programmatic_launch.__wrapped__)
    packed = PackedLaunch(0x1234, LaunchConfig((1, 1), 32, programmatic=True), (), stream=0)
    config = _Config.from_address(packed.addresses[0])
    assert config.number_of_attributes == expected
    if expected:
        attribute = (ctypes.c_int * 18).from_address(config.attributes)  # CUlaunchAttribute: id, padding, value
        assert list(attribute) == [6, 0, 1] + 15 * [0]


@pytest.mark.parametrize(
    ("name", "device", "alignment", "is_early"),
    [
        ("fused_wgmma", H200, 16, True),
        ("fused_wgmma_small", H200, 16, True),
        ("fused_decode", H200, 16, True),
        ("fused_decode", H200, 8, False),  # reads that are not of 16 bytes may go through the read-only cache
        ("fused_decode", A100, 16, False),
        ("fused_decode", B200, 16, False),
        ("fused_gemv", H200, 16, True),
        ("fused_gemv", H200, 4, False),
        ("fused_mma", H200, 16, False),
    ],
)
def test_what_is_launched_early(
    monkeypatch: pytest.MonkeyPatch, name: str, device: DeviceInfo, alignment: int, is_early: bool
) -> None:
    kernel = CompiledKernel(SimpleNamespace(ptr=0x1234), Resources(32, 0, 0), name)
    monkeypatch.setattr("autodispatch.variants.executables.compile_kernel", lambda *_: kernel)
    monkeypatch.setattr("autodispatch.variants.wgmma.tensor_map", lambda *_: np.zeros(128, np.uint8).view("V128"))
    monkeypatch.setattr(driver, "has_programmatic_launch", lambda: True)
    problem = Problem(1, 64, 64, "float16", alignment=alignment)
    candidate = VARIANTS[name].candidate(problem, device)
    assert candidate is not None
    x = Matrix(4096, 64, 64, 64, 1, "float16", 0, None)
    packed = candidate.executable(problem, device).pack(Call(Operands(x, x, x, x), 0, SimpleNamespace(ptr=0)))
    assert packed is not None
    assert _Config.from_address(packed.addresses[0]).number_of_attributes == is_early
