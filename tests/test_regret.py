"""What is lost where only some m are tuned: the pick is that of the other m, and raced against the best."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autodispatch import regret
from autodispatch.exchange import Filter, load_seeds, select
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord, DeviceRecord
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin, selections
from autodispatch.store import TuningStore
from autodispatch.variants import Registry
from tests.fakes import H200, FakeVariant, FakeWorkbench, like, registry_of
from tests.test_exchange import SEEDS
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


@pytest.mark.parametrize("seed", SEEDS, ids=lambda p: p.stem)
def test_what_is_picked_between_four_tuned_m_is_near_the_best_that_was_measured(seed: Path) -> None:
    shipped = load_seeds([seed])
    (found,) = shipped.all_of(DeviceRecord)
    attributes = ("l2_bytes", "shared_bytes_per_block", "clock_khz", "bandwidth")
    device = like(H200, **{a: getattr(found, a) for a in attributes})
    assert device.key == found.key
    decisions: dict[Problem, dict[int, DecisionRecord]] = defaultdict(dict)
    for d in shipped.all_of(DecisionRecord):
        decisions[replace(d.problem, m=1)][d.problem.m] = d
    known = (1, 16, 256, 4096)
    few = TuningStore()
    few.add_all(select(shipped, Filter(ms=known)))
    layers = Layers([("few", few)])
    shares, unmeasured = [], 0
    for base, by_m in decisions.items():
        if not set(known) <= set(by_m):
            continue
        for m in sorted(set(by_m) - set(known)):
            pick = next(selections(replace(base, m=m), device, Registry(), layers)).candidate
            finalists = (shipped.measurement(i) for i in by_m[m].finalists)
            times = {(r.variant, r.config): r.median_us for r in finalists if r is not None and r.median_us}
            if pick.key in times:
                shares.append(times[pick.key] / min(times.values()) - 1)
            else:
                unmeasured += 1
    assert len(shares) > 50
    assert unmeasured <= 5
    assert statistics.median(shares) < 0.01
    assert np.percentile(shares, 95) < 0.05
