"""Forked processes: they begin anew, or are told that CUDA cannot be used in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autodispatch import device
from autodispatch.errors import DeviceError
from tests.test_planning import CPU

FORKED = """
import os, sys, threading
import numpy as np
from pathlib import Path
from autodispatch import Dispatcher, Settings

d = Dispatcher(Settings(Path(sys.argv[1])))
arrays = [np.ones(s, np.float32) for s in ((24, 32), (32, 40), (32, 40))]
d.run(*arrays)
d._lock.acquire()  # as by another thread in the moment of the fork
child = os.fork()
if child == 0:
    same = bool((d.run(*arrays) == d.run(*arrays, candidate="cpu_split")).all())
    os._exit(0 if same else 1)
d._lock.release()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_process_begins_anew_and_does_not_hang(tmp_path: Path) -> None:
    script = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "t.db")]
    result = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_a_process_forked_from_one_that_used_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_is_forked", True)
    with pytest.raises(DeviceError, match="'spawn'"):
        device.cuda_device(0)
    with pytest.raises(DeviceError, match="'spawn'"):
        device.default_device()  # and not the CPU, silently


@pytest.mark.parametrize("is_child", [False, True])
def test_a_child_of_a_process_that_used_cuda_otherwise_says_so_too(
    monkeypatch: pytest.MonkeyPatch, is_child: bool
) -> None:
    class NotInitializedError(RuntimeError):
        status = 3

    def call(*_: int) -> None:
        raise NotInitializedError("cudaErrorInitializationError: initialization error")

    runtime = SimpleNamespace(getDeviceCount=call, getDeviceProperties=call)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(device, "import_cupy", lambda: cupy)
    monkeypatch.setattr(device, "_is_child", is_child)
    with pytest.raises(DeviceError, match="'spawn'" if is_child else "must be usable"):
        device.cuda_device(7)
    if is_child:
        with pytest.raises(DeviceError, match="'spawn'"):
            device.default_device()
    else:
        assert device.default_device() == CPU
