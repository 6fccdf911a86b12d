"""What one process leaves for the next: kernels in the cache, winners in the database."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autodispatch.benchmark import CudaWorkbench
from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import DeviceInfo
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import CompileError
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.settings import Settings
from autodispatch.source import parse
from autodispatch.tuner import Tuner

pytestmark = pytest.mark.gpu

SECOND_PROCESS = """
import json, sys
import numpy
from autodispatch.device import import_cupy

cupy = import_cupy()
from cupy.cuda import nvrtc

compiled = []
create = nvrtc.createProgram
def counting(source, *rest):
    if source:
        compiled.append(source[:60])
    return create(source, *rest)
nvrtc.createProgram = counting

from autodispatch import dispatcher
m, n, k = map(int, sys.argv[1].split(","))
a, b1, b2 = (cupy.ones(s, numpy.float16) for s in ((m, k), (k, n), (k, n)))
cupy.cuda.Device().synchronize()
before = len(compiled)
out = dispatcher.run(a, b1, b2)
explanation = dispatcher.explain(a, b1, b2)
print(json.dumps({
    "origin": explanation.selection.origin.value,
    "compiled": compiled[before:],
    "candidate": str(explanation.selection.candidate),
    "tuner": "autodispatch.tuner" in sys.modules,
    "value": float(out[0, 0]),
}))
"""


def second_process(shape: str, **environment: str) -> dict[str, object]:
    script = [sys.executable, "-c", SECOND_PROCESS, shape]
    result = subprocess.run(
        script, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_second_process_finds_the_winner_and_neither_compiles_nor_times(
    tmp_path: Path, device: DeviceInfo, settings: Settings
) -> None:
    problem = Problem(64, 128, 128, "float16")
    cache = {"CUPY_CACHE_DIR": str(tmp_path / "kernels"), "AUTODISPATCH_DB": str(settings.database)}
    untuned = second_process("64,128,128", **cache)
    assert untuned["origin"] == "heuristic" and untuned["compiled"]
    dispatcher = Dispatcher(settings)
    Tuner(dispatcher.layers.user, LocalRunner(CudaWorkbench(device))).tune(problem)
    winner = dispatcher.explain_problem(problem, device).selection.candidate
    dispatcher.close()
    first = second_process("64,128,128", **cache)  # fills this test's own kernel cache
    assert first["origin"] == "tuned" and first["candidate"] == str(winner)
    second = second_process("64,128,128", **cache)
    assert second["compiled"] == [] and second["tuner"] is False
    assert second["candidate"] == str(winner)
    assert second["value"] == pytest.approx(128 * 128, rel=1e-3)


def test_a_kernel_cache_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    found = second_process("8,8,8", CUPY_CACHE_DIR=str(blocked), AUTODISPATCH_DB=str(blocked / "tuning.db"))
    assert found["value"] == pytest.approx(64, rel=1e-2)


def test_paths_with_blanks_and_other_alphabets(tmp_path: Path) -> None:
    home = tmp_path / "Zoë 空 x"
    home.mkdir()
    found = second_process("8,8,8", HOME=str(home), TMPDIR=str(home), AUTODISPATCH_DB=str(home / "tuning.db"))
    assert found["value"] == pytest.approx(64, rel=1e-2)


TOGETHER = """
import sys, time
from pathlib import Path
from autodispatch.compiler import KernelSpec, compile_kernel
from autodispatch.device import cuda_device
from autodispatch.launch import LaunchConfig, pointer
from autodispatch.source import parse
import cupy

value, ready, go = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
body = f"template <int Unused>\\n__global__ void answer(int* out) {{ out[0] = {value}; }}"
device, out = cuda_device(0), cupy.zeros(1, "int32")
ready.touch()
while not go.exists():
    time.sleep(0.001)
kernel = compile_kernel(KernelSpec(parse("answer", body), (("Unused", 3),)), device)
kernel(LaunchConfig((1, 1), 1), (pointer(out.data.ptr),), None)
print(int(out[0]))
"""


@pytest.mark.parametrize("values", [[7] * 8, [7, 8] * 4], ids=["one kernel", "two kernels of one name"])
def test_processes_that_compile_at_the_same_moment_get_their_own_kernel(tmp_path: Path, values: list[int]) -> None:
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "kernels")}
    go = tmp_path / "go"
    for _ in ("an empty cache", "a full one"):
        ready = [tmp_path / f"ready {i}" for i in range(len(values))]
        scripts = [
            [sys.executable, "-c", TOGETHER, str(v), str(r), str(go)] for v, r in zip(values, ready, strict=True)
        ]
        processes = [
            subprocess.Popen(s, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for s in scripts
        ]
        deadline = time.monotonic() + 120
        while not all(r.exists() for r in ready) and time.monotonic() < deadline:
            time.sleep(0.01)
        go.touch()
        results = [p.communicate(timeout=120) for p in processes]
        assert [p.returncode for p in processes] == [0] * len(values), [stderr for _, stderr in results]
        assert [int(stdout) for stdout, _ in results] == values
        for path in (go, *ready):
            path.unlink()


WGMMA = """
template <int Unused>
__global__ void fence(int* out) {
  asm volatile("wgmma.fence.sync.aligned;");
  out[0] = Unused;
}
"""


def test_architecture_features_reach_the_compiler_where_they_are_asked_for(device: DeviceInfo) -> None:
    if device.compute_capability != (9, 0):
        pytest.skip("the instruction exists on compute capability 9.0 only")
    spec = KernelSpec(parse("fence", WGMMA), (("Unused", 3),), architecture_features=True)
    assert compile_kernel(spec, device).resources.spill_bytes == 0
    with pytest.raises(CompileError) as error:
        compile_kernel(KernelSpec(spec.source, (("Unused", 3),)), device)
    assert "wgmma" in error.value.log and "fence<3>" in str(error.value)


TUNES = """
import ctypes, sys
from pathlib import Path
import autodispatch
from autodispatch import driver; from autodispatch.device import cuda_device

autodispatch.tune([autodispatch.Problem(16, 512, 256, "float16")], device=cuda_device(0), database=Path(sys.argv[1]))
flags, active = ctypes.c_uint(), ctypes.c_int()
library = driver.library()
assert library.cuInit(0) == 0
assert library.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print("active", active.value)
"""


def test_the_process_that_tunes_holds_no_context_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TUNES, str(tmp_path / "t.db")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "active 0"
