"""Devices, variants and workbenches that exist only in tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autodispatch.benchmark import Trial, Workbench
from autodispatch.config import Config, ConfigSpace, Restriction
from autodispatch.device import DeviceInfo, cpu_device
from autodispatch.errors import CompileError
from autodispatch.problem import Problem
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner, Outcome
from autodispatch.variants import Candidate, Executable, Registry, Variant
from autodispatch.variants.base import Call, Unit, Work

KIB, GIB = 1 << 10, 1 << 30


def gpu(name: str, capability: tuple[int, int], sms: int, gib: int, shared_kib: int, **more: Any) -> DeviceInfo:
    return DeviceInfo(
        kind="cuda",
        name=name,
        compute_capability=capability,
        sm_count=sms,
        memory_bytes=gib * GIB,
        l2_bytes=50 << 20,
        shared_bytes_per_block=shared_kib * KIB,
        shared_bytes_per_sm=(shared_kib + 1) * KIB,
        registers_per_sm=64 * KIB,
        threads_per_sm=1024 if capability == (7, 5) else 1536,
        clock_khz=1_700_000,
        bandwidth=2e12,
        index=0,
        nvrtc_version=(13, 0),
        **more,
    )


T4 = gpu("Tesla T4", (7, 5), 40, 15, 64)
A100 = gpu("A100-SXM4-80GB", (8, 0), 108, 80, 163)
RTX3090 = gpu("GeForce RTX 3090", (8, 6), 82, 24, 99)
L40S = gpu("L40S", (8, 9), 142, 45, 99)
H200 = gpu("H200", (9, 0), 132, 140, 227)
B200 = gpu("B200", (10, 0), 148, 180, 227)
RTX5090 = gpu("GeForce RTX 5090", (12, 0), 170, 32, 99)
GPUS = (T4, A100, RTX3090, L40S, H200, B200, RTX5090)


@dataclass(frozen=True)
class FakeConfig(Config):
    speed: int


class FakeExecutable(Executable):
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, call: Call) -> None:
        raise AssertionError("a fake is never launched")


class FakeVariant(Variant):
    """A variant that a FakeWorkbench runs: its config is its time in microseconds, unless `times` says otherwise."""

    kind = "cpu"

    def __init__(
        self,
        name: str,
        path: str = "fused",
        speeds: tuple[int, ...] = (10,),
        *,
        digest: str = "d1",
        build_error: str = "",
        is_library: bool = False,
        workspace: int = 0,
        requirement: Callable[[Problem, DeviceInfo], bool] | None = None,
    ) -> None:
        self.name, self.path, self.is_library = name, path, is_library
        self.space = ConfigSpace(FakeConfig, {"speed": speeds})
        self.digest = digest  # type: ignore[misc]
        self._build_error, self._workspace = build_error, workspace
        if requirement is not None:
            self.requirements = (Restriction(lambda c, p, d: requirement(p, d), "what the test says"),)

    def default(self, problem: Problem, device: DeviceInfo) -> FakeConfig:
        return FakeConfig(self.space.axes["speed"][0])

    def work(self, config: FakeConfig, problem: Problem) -> Work:
        return Work(Unit.CPU, config.speed, 64, 64, 2, 1, 0, 1)

    def workspace_bytes(self, config: FakeConfig, problem: Problem) -> int:
        return self._workspace

    def executable(self, config: FakeConfig, problem: Problem, device: DeviceInfo) -> Executable:
        if self._build_error:
            raise CompileError(self._build_error, log="the log", expression=self.name)
        executable = FakeExecutable(self.name)
        executable.speed = float(config.speed)  # type: ignore[attr-defined]
        return executable


def registry_of(*variants: Variant) -> dict[str, Variant]:
    return {v.name: v for v in variants}


class FakeWorkbench(Workbench):
    """Times fakes by a table instead of a clock. A check is `ok` unless `checks` says otherwise: a Check, or an
    exception to raise."""

    regime = "graph-cold"

    def __init__(
        self,
        device: DeviceInfo,
        times: Mapping[str, Callable[[], float]] | None = None,
        checks: Mapping[str, Check | BaseException] | None = None,
        *,
        is_healthy: bool = True,
    ) -> None:
        super().__init__(device)
        self._times, self._checks, self._is_healthy = times or {}, checks or {}, is_healthy
        self.loaded: list[Problem] = []
        self.log: list[str] = []

    def load(self, problem: Problem, copies: int | None = None) -> None:
        self.loaded.append(problem)

    def unload(self) -> None:
        self.log.append("unload")

    def healthy(self) -> bool:
        return self._is_healthy

    def check(self, executable: Any, problem: Problem | None = None) -> Check:
        self.log.append(f"check {executable.name}")
        outcome = self._checks.get(executable.name, Check("ok", "", 1e-4, 1e-3))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def trial(self, executable: Any) -> Trial:
        time = self._times.get(executable.name)
        return time if time is not None else lambda: float(executable.speed)


def like(device: DeviceInfo, **changes: Any) -> DeviceInfo:
    return replace(device, **changes)


def worker_runner(kind: str, index: int) -> tuple[LocalRunner, Registry]:
    """What a worker of the tests serves: variants named by what they do to it."""

    class Deadly(FakeWorkbench):
        def check(self, executable: Any, problem: Problem | None = None) -> Check:
            if executable.name == "segfaults":
                os.kill(os.getpid(), signal.SIGSEGV)
            if executable.name == "exits":
                os._exit(7)
            if executable.name.startswith("hangs"):
                time.sleep(600)
            if executable.name == "ruins":
                self._is_healthy = False
                raise RuntimeError("an illegal memory access was encountered")
            return super().check(executable, problem)

    class Ruined(LocalRunner):
        def finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None = None) -> list[Outcome]:
            if any(c.variant.name == DIES_IN_THE_FINALS.name for c in candidates):
                os.kill(os.getpid(), signal.SIGSEGV)
            return super().finals(candidates, rounds, deadline)

    return Ruined(Deadly(cpu_device())), Registry(registry_of(*DEADLY, HANGS_LATER, DIES_IN_THE_FINALS))


DEADLY = [FakeVariant(name, speeds=(i + 10,)) for i, name in enumerate(("segfaults", "exits", "hangs", "ruins"))]
DEADLY += [FakeVariant("good", speeds=(20,)), FakeVariant("slower", "split", (25,), is_library=True)]
HANGS_LATER = FakeVariant("hangs later", speeds=(40,))  # than the good ones
DIES_IN_THE_FINALS = FakeVariant("dies in the finals", speeds=(15,))  # of which it would be the winner
