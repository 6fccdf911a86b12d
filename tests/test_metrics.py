"""What a process tells of its calls: counters, Prometheus, log lines."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autodispatch import planning
from autodispatch.dispatcher import Dispatcher
from autodispatch.settings import Settings
from autodispatch.variants import Candidate
from tests.test_planning import ARGUMENTS


def test_compiles_count_the_kernels_that_a_first_call_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = 0
    whole = Candidate.executable

    def building(self: Candidate, *arguments: Any) -> Any:
        nonlocal kernels
        kernels += 2
        return whole(self, *arguments)

    monkeypatch.setattr(planning, "number_of_kernels", lambda: kernels)
    monkeypatch.setattr(Candidate, "executable", building)
    d = Dispatcher(Settings(tmp_path / "t.db"))
    for _ in range(3):
        d.run(*ARGUMENTS)
    assert d.counters().compiles == 2
    d.close()


def test_counters_tell_copies_misses_and_calls(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db"))
    a, b1, b2 = ARGUMENTS
    for _ in range(3):
        d.run(a[::-1], b1, b2)
    found = d.counters()
    assert (found.copies, found.misses, sum(found.calls.values())) == (3, 1, 3)
    d.close()
    assert sum(d.counters().calls.values()) == 0


def test_prometheus_collects_the_counters(tmp_path: Path) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from autodispatch import prometheus

    d = Dispatcher(Settings(tmp_path / "t.db"))
    registry = prometheus_client.CollectorRegistry()
    prometheus.register(d, registry)
    for _ in range(4):
        d.run(*ARGUMENTS)
    assert registry.get_sample_value("autodispatch_calls_total", {"origin": "heuristic"}) == 4
    assert registry.get_sample_value("autodispatch_misses_total") == 1
    d.close()


def test_one_line_per_new_key_is_logged_at_debug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db"))
    with caplog.at_level(logging.DEBUG, "autodispatch"):
        for _ in range(3):
            d.run(*ARGUMENTS)
    lines = [r for r in caplog.records if r.levelno == logging.DEBUG and "24,40,32 float32 kn on" in r.getMessage()]
    assert len(lines) == 1
    d.close()


@pytest.mark.parametrize(("level", "heard"), [("debug", True), ("error", False)])
def test_the_log_setting_writes_lines_to_standard_error(tmp_path: Path, level: str, heard: bool) -> None:
    code = "import numpy as np; from autodispatch import run; x = np.ones((4, 4), np.float32); run(x, x, x)"
    env = {**os.environ, "AUTODISPATCH_LOG": level, "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ("autodispatch DEBUG 4,4,4 float32 kn on" in result.stderr) is heard
    assert ("is not tuned on" in result.stderr) is heard
