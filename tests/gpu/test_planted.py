"""A tuning with candidates that ruin the device, never end, are wrong, or write where they must not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autodispatch.benchmark import CudaWorkbench
from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo, cuda_device
from autodispatch.launch import LaunchConfig, pointer
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.source import parse
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Executable, Registry
from autodispatch.variants.base import Call, Unit, Work
from autodispatch.worker import WorkerRunner
from tests.fakes import FakeVariant

pytestmark = pytest.mark.gpu

STATEMENTS = {
    "illegal": "*reinterpret_cast<volatile int*>(16) = Value;",
    "endless": "while (*static_cast<volatile char*>(out) == *static_cast<volatile char*>(out)) {}",
    "wrong": "*static_cast<volatile short*>(out) = Value;",
    "overruns": "static_cast<volatile char*>(workspace)[256] = Value;",
    "underruns": "static_cast<volatile char*>(workspace)[-1] = Value;",
}


class PlantedExecutable(Executable):
    workspace_bytes = 256

    def __init__(self, name: str, device: DeviceInfo) -> None:
        body = f"template <int Value>\n__global__ void {name}(void* out, void* workspace) {{ {STATEMENTS[name]} }}"
        self._kernel = compile_kernel(KernelSpec(parse(name, body), (("Value", 1),)), device)

    def __call__(self, call: Call) -> None:
        arguments = (pointer(call.operands.out.pointer), pointer(call.workspace))
        self._kernel(LaunchConfig((1, 1), 1), arguments, call.stream)


class Planted(FakeVariant):
    kind = "cuda"

    def work(self, config: Any, problem: Problem) -> Work:
        return Work(Unit.FP32, config.speed, 64, 64, 2, 128, 0, 1)

    def executable(self, config: Any, problem: Problem, device: DeviceInfo) -> Executable:
        return PlantedExecutable(self.name, device)


def registry() -> Registry:
    planted = {name: Planted(name) for name in STATEMENTS}
    return Registry({**planted, **{name: VARIANTS[name] for name in ("fused_simt", "split_simt", "split_cublas")}})


def worker(kind: str, index: int) -> tuple[LocalRunner, Registry]:
    return LocalRunner(CudaWorkbench(cuda_device(index))), registry()


def test_a_planted_fault_costs_its_candidate_alone_and_is_stored_with_its_reason(
    device: DeviceInfo, tmp_path: Path
) -> None:
    problem = Problem(64, 128, 128, "float16")
    runner = WorkerRunner(device, "tests.gpu.test_planted:worker", run_limit_s=5.0)
    with closing(TuningStore(tmp_path / "tuning.db")) as store, closing(Tuner(store, runner, registry())) as tuner:
        decision = tuner.tune(problem)
        leader = store.measurement(decision.leader)
        found = {r.variant: (r.status, r.reason) for r in store.measurements() if r.stage == "screen"}
    for name, (status, reason) in found.items():
        print(f"{name}: {status} {reason}")
    assert leader is not None
    assert leader.variant in ("fused_simt", "split_simt", "split_cublas")
    assert found["illegal"][0] == "launch_failed" and "illegal memory access" in found["illegal"][1]
    assert found["endless"][0] == "timeout" and "over 5" in found["endless"][1]
    assert found["wrong"][0] == "wrong_result"
    for name in ("overruns", "underruns"):
        assert found[name] == ("out_of_bounds", "bytes around the workspace were written")
