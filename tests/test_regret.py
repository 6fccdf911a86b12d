"""What is lost where only some m are tuned: the pick is that of the other m, and raced against the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autodispatch import regret
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.variants import Registry
from tests.fakes import H200, FakeVariant, FakeWorkbench, registry_of
from tests.test_explanation import VERSIONS

BASE = Problem(64, 128, 256, "float16")


class CudaFake(FakeVariant):
    kind = "cuda"


def test_a_pick_from_a_near_m_is_raced_and_a_tuned_one_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(registry_of(CudaFake("any"), CudaFake("library", "split", (20,), is_library=True)))
    monkeypatch.setattr(regret, "Registry", lambda: registry)
    monkeypatch.setattr("autodispatch.tuner.environment", lambda device: VERSIONS)
    runner = LocalRunner(FakeWorkbench(H200))
    known, asked = [BASE], [replace(BASE, m=m) for m in (64, 100, 1000)]
    found = list(regret.measure(runner, known, asked, rounds=5))
    assert [x.selection.origin for x in found] == [Origin.TUNED, Origin.BUCKET, Origin.HEURISTIC]
    assert all(x.share >= 0 and x.pick_us >= x.best_us > 0 for x in found)
    assert found[0].share == pytest.approx(0, abs=0.05)
