"""select(): the order of what is asked, and every field that must match."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from autodispatch import heuristics
from autodispatch.device import DeviceInfo, cpu_device
from autodispatch.errors import StoreError, UnsupportedProblemError
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin, select, selections
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Candidate, Registry, Variant
from tests.fakes import A100, GPUS, H200, FakeVariant, FakeWorkbench, like, registry_of
from tests.stored import decided

CPU = cpu_device()
PROBLEM = Problem(64, 128, 256, "float32")
FAST, SLOW = FakeVariant("fast", speeds=(5,)), FakeVariant("slow", "split", (50,), is_library=True)


def registry(*variants: Variant) -> Registry:
    return Registry(registry_of(*(variants or (FAST, SLOW))))


def tuned(
    store: TuningStore, problem: Problem = PROBLEM, device: DeviceInfo = CPU, winner: str = "slow"
) -> DecisionRecord:
    times = {winner: lambda: 1.0}
    return Tuner(store, LocalRunner(FakeWorkbench(device, times)), registry()).tune(problem)


def test_what_was_tuned_comes_before_the_model(store: TuningStore) -> None:
    layers = Layers([("user", store)])
    assert select(PROBLEM, CPU, registry(), layers).origin is Origin.HEURISTIC
    assert select(PROBLEM, CPU, registry(), layers).candidate.variant is FAST
    decision = tuned(store)
    selection = select(PROBLEM, CPU, registry(), layers)
    assert (selection.origin, selection.candidate.variant) == (Origin.TUNED, SLOW)
    assert (selection.layer, selection.decision, selection.median_us) == ("user", decision, 1.0)
    assert "measured 1.0 us" in selection.reason


def test_the_first_layer_that_knows_wins() -> None:
    first, second = TuningStore(), TuningStore()
    tuned(second, winner="slow")
    layers = Layers([("user", first), ("shipped", second)])
    selection = select(PROBLEM, CPU, registry(), layers)
    assert (selection.layer, selection.candidate.variant) == ("shipped", SLOW)
    tuned(first, winner="fast")
    selection = select(PROBLEM, CPU, registry(), layers)
    assert (selection.layer, selection.candidate.variant) == ("user", FAST)


def test_the_nearest_m_serves_up_to_a_factor_of_two_and_says_so(store: TuningStore) -> None:
    layers = Layers([("user", store)])
    for m in (8, 64):
        tuned(store, replace(PROBLEM, m=m))

    def origin(m: int) -> tuple[Origin, int | None]:
        found = select(replace(PROBLEM, m=m), CPU, registry(), layers)
        return found.origin, found.decision.m if found.decision else None

    assert origin(8) == (Origin.TUNED, 8)
    assert origin(9) == (Origin.BUCKET, 8)
    assert origin(16) == (Origin.BUCKET, 8)
    assert origin(17) == (Origin.HEURISTIC, None)
    assert origin(31) == (Origin.HEURISTIC, None)
    assert origin(32) == (Origin.BUCKET, 64)
    assert origin(4) == (Origin.BUCKET, 8)
    assert origin(3) == (Origin.HEURISTIC, None)
    assert origin(2048) == (Origin.HEURISTIC, None)
    reason = select(replace(PROBLEM, m=100), CPU, registry(), layers).reason
    assert "at m = 64, the nearest tuned m" in reason


def test_a_near_decision_yields_where_the_model_agrees_with_it_and_expects_other_tiles_to_do_better_here() -> None:
    problem = Problem(512, 8960, 1536, "bfloat16", "nk")
    wide = {"tile_m": 128, "tile_n": 96, "cooperative": 0}
    layers = decided(problem, "fused_wgmma", **wide)
    first, second = itertools.islice(selections(replace(problem, m=384), H200, Registry(), layers), 2)
    assert [(s.origin, s.decision.m) for s in (first, second) if s.decision] == [(Origin.BUCKET, 512)] * 2
    assert second.candidate.config.tile_n == 96 and second.median_us == 41.0
    # 282 tiles of 96 columns take a third round of 132 SMs for the last 18
    expected = [heuristics.predict(s.candidate, s.problem, H200).total for s in (first, second)]
    assert expected[1] > 1.08 * expected[0] and first.median_us is None
    assert "agrees with the pick at m = 512" in first.reason and str(second.candidate) in first.reason
    for m in (500, 600):  # at 600 other tiles are expected to do better, but not clearly
        near, choice = replace(problem, m=m), select(replace(problem, m=m), H200, Registry()).candidate
        shares = [heuristics.predict(c, near, H200).total for c in (second.candidate, choice)]
        assert (1.01 < shares[0] / shares[1] < 1.08) == (m == 600)
        found = select(near, H200, Registry(), layers)
        assert (found.candidate, found.median_us) == (second.candidate, 41.0)
    kept = select(replace(problem, m=384), H200, Registry(), layers, max_error=1.0)
    assert kept.candidate == second.candidate  # of the other no error is known


def test_a_near_decision_stays_where_the_model_does_not_agree_with_it() -> None:
    problem = Problem(512, 8960, 1536, "bfloat16", "nk")
    layers = decided(problem, "fused_mma", tile_m=64, tile_n=64)
    found = select(replace(problem, m=384), H200, Registry(), layers)
    assert (found.origin, found.candidate.variant.name, found.median_us) == (Origin.BUCKET, "fused_mma", 41.0)


def test_of_two_equally_near_m_the_larger_serves(store: TuningStore) -> None:
    for m in (32, 128):
        tuned(store, replace(PROBLEM, m=m))
    found = select(PROBLEM, CPU, registry(), Layers([("user", store)]))
    assert found.decision is not None
    assert found.decision.m == 128


@pytest.mark.parametrize(
    "change",
    [
        {"name": "Another processor"},
        {"sm_count": CPU.sm_count + 1},
        {"memory_bytes": CPU.memory_bytes + (8 << 30)},
        {"mig_profile": "1g.5gb"},
        {"compute_capability": (9, 0)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_every_field_of_the_device_must_match(store: TuningStore, change: dict[str, Any]) -> None:
    tuned(store)
    layers = Layers([("user", store)])
    assert select(PROBLEM, CPU, registry(), layers).origin is Origin.TUNED
    assert select(PROBLEM, like(CPU, **change), registry(), layers).origin is Origin.HEURISTIC


@pytest.mark.parametrize("change", [{"clock_khz": 1}, {"uuid": "x"}, {"index": 3}, {"nvrtc_version": (12, 9)}])
def test_other_fields_of_the_device_do_not_matter(store: TuningStore, change: dict[str, Any]) -> None:
    tuned(store)
    assert select(PROBLEM, like(CPU, **change), registry(), Layers([("user", store)])).origin is Origin.TUNED


def test_a_near_miss_names_both_devices(store: TuningStore) -> None:
    other = like(CPU, sm_count=CPU.sm_count + 1)
    tuned(store, device=other)
    layers = Layers([("user", store)])
    reason = select(PROBLEM, CPU, registry(), layers).reason
    assert f"records of {other.key} (sm_count {other.sm_count}) are not for this {CPU.key}" in reason
    assert other.key not in select(replace(PROBLEM, n=999), CPU, registry(), layers).reason


def test_a_record_of_changed_kernels_is_a_miss_and_stays(store: TuningStore) -> None:
    tuned(store)
    layers = Layers([("user", store)])
    changed = registry(FAST, FakeVariant("slow", "split", (50,), digest="d2", is_library=True))
    selection = select(PROBLEM, CPU, changed, layers)
    assert selection.origin is Origin.HEURISTIC
    assert "of the decision for m = 64 the kernels of slow have changed since it was tuned" in selection.reason
    assert store.counts()["decisions"] == 1
    assert select(PROBLEM, CPU, registry(), layers).origin is Origin.TUNED


def test_a_record_of_an_unknown_variant_or_config_is_a_miss(store: TuningStore) -> None:
    tuned(store)
    layers = Layers([("user", store)])
    assert "the candidate is not known" in select(PROBLEM, CPU, registry(FAST), layers).reason
    other = registry(FAST, FakeVariant("slow", "split", (51,), is_library=True))
    assert select(PROBLEM, CPU, other, layers).origin is Origin.HEURISTIC


def test_a_tuned_candidate_that_is_not_legal_here_is_passed_over(store: TuningStore) -> None:
    tuned(store)
    refusing = FakeVariant("slow", "split", (50,), is_library=True, requirement=lambda p, d: p.m != 65)
    layers = Layers([("user", store)])
    assert select(PROBLEM, CPU, registry(FAST, refusing), layers).origin is Origin.TUNED
    selection = select(replace(PROBLEM, m=65), CPU, registry(FAST, refusing), layers)
    assert selection.origin is Origin.HEURISTIC
    assert "slow requires what the test says" in selection.reason


def test_a_store_that_fails_is_left_out_with_a_warning(
    store: TuningStore, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    tuned(store)
    broken = TuningStore()

    def fail(*_: object) -> None:
        raise StoreError("database is locked")

    monkeypatch.setattr(broken, "decisions", fail)
    layers = Layers([("user", broken), ("shipped", store)])
    assert select(PROBLEM, CPU, registry(), layers).layer == "shipped"
    assert "database is locked" in warnings_logged.text


def test_a_decision_for_a_candidate_that_failed_is_not_used(store: TuningStore) -> None:
    decision = tuned(store)
    store.write(lambda db: db.execute("UPDATE measurements SET status = 'crashed', median_us = NULL"))
    assert store.decision(CPU.key, PROBLEM) == decision
    assert select(PROBLEM, CPU, registry(), Layers([("user", store)])).origin is Origin.HEURISTIC


def test_a_pinned_candidate_is_taken_as_it_is(store: TuningStore) -> None:
    tuned(store)
    pinned = Candidate(FAST, FAST.default(PROBLEM, CPU))
    found = list(selections(PROBLEM, CPU, registry(), Layers([("user", store)]), pinned))
    assert [(s.origin, s.candidate) for s in found] == [(Origin.PINNED, pinned)]


def test_all_selections_end_with_the_library_and_every_default(store: TuningStore) -> None:
    tuned(store, winner="fast")
    found = [s.origin for s in selections(PROBLEM, CPU, registry(), Layers([("user", store)]))]
    assert found == [Origin.TUNED, Origin.HEURISTIC, Origin.LIBRARY, Origin.HEURISTIC]


def test_nothing_that_can_serve_is_an_error_that_names_problem_and_device() -> None:
    with pytest.raises(UnsupportedProblemError, match=f"64,128,256 float32 kn on {CPU.name}"):
        select(PROBLEM, CPU, registry(FakeVariant("never", requirement=lambda p, d: False)))


# the cost model


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.key)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_model_is_positive_finite_and_grows_with_the_work(device: DeviceInfo, dtype: str) -> None:
    for candidate in Registry().defaults(Problem(4096, 8192, 4096, dtype), device):
        times = [
            heuristics.predict(candidate, Problem(m, 8192, 4096, dtype), device).total
            for m in (1, 128, 1024, 8192, 65536)
        ]
        assert all(0 < t < 1e3 for t in times)
        assert times == sorted(times)


def test_the_model_uses_the_devices_attributes() -> None:
    candidate = VARIANTS["fused_mma"].candidate(Problem(4096, 4096, 4096, "float16"), A100)
    assert candidate is not None
    large = Problem(8192, 8192, 8192, "float16")
    base = heuristics.predict(candidate, large, A100)
    assert heuristics.predict(candidate, large, like(A100, sm_count=54)).total > 1.5 * base.total
    assert heuristics.predict(candidate, large, like(A100, clock_khz=850_000)).total > 1.5 * base.total
    small = Problem(16, 8192, 8192, "float16")
    candidate = VARIANTS["fused_mma"].candidate(small, A100)
    assert candidate is not None
    by_memory = heuristics.predict(candidate, small, A100)
    assert by_memory.bound == "memory"
    assert heuristics.predict(candidate, small, like(A100, bandwidth=5e11)).memory > 1.5 * by_memory.memory
    assert heuristics.predict(candidate, small, like(A100, name="Renamed")) == by_memory


def test_the_model_prefers_tensor_cores_to_fp32_units_and_small_tiles_for_few_rows() -> None:
    for m in (1, 64, 4096):
        problem = Problem(m, 8960, 1536, "float16")
        ranked = heuristics.rank(Registry().candidates(problem, A100), problem, A100)
        assert not ranked[0].variant.name.endswith("simt")
    decode = Problem(1, 8960, 1536, "float16")
    best = next(
        c for c in heuristics.rank(Registry().candidates(decode, H200), decode, H200) if c.variant.name == "fused_mma"
    )
    assert best.config.tile_m == 16  # type: ignore[attr-defined]


@pytest.mark.parametrize(("m", "tile", "tail_m"), [(256, (128, 64), 32), (512, (128, 64), 64), (4096, (128, 64), 0)])
def test_the_model_knows_the_best_tiles_by_mma_as_they_were_measured(
    m: int, tile: tuple[int, int], tail_m: int
) -> None:
    problem = Problem(m, 8960, 1536, "bfloat16", "nk")
    ranked = heuristics.rank(VARIANTS["fused_mma"].candidates(problem, H200), problem, H200)
    best = vars(ranked[0].config)
    assert (best["tile_m"], best["tile_n"], best["tail_m"]) == (*tile, tail_m)
    assert (best["warps_m"], best["warps_n"], best["tile_k"], best["num_stages"]) == (2, 2, 64, 3)


@pytest.mark.parametrize(
    ("n", "k", "fastest"),
    [(8960, 1536, "fused_gemv"), (14336, 4096, "fused_decode"), (18944, 3584, "fused_decode")],
)
def test_one_row_goes_to_the_fp32_units_where_k_is_short_as_it_was_measured(n: int, k: int, fastest: str) -> None:
    device = like(H200, clock_khz=1980000, bandwidth=4814304000000.0)
    problem = Problem(1, n, k, "bfloat16", "nk")
    some = [c for name in ("fused_gemv", "fused_decode") for c in VARIANTS[name].candidates(problem, device)]
    ranked = heuristics.rank(some, problem, device)
    assert ranked[0].variant.name == fastest
    gemv = next(c for c in ranked if c.variant.name == "fused_gemv")
    assert heuristics.predict(gemv, problem, device).total < 1.05 * heuristics.predict(ranked[0], problem, device).total
    if fastest == "fused_gemv":  # whole steps of three vectors per lane
        assert (gemv.config.warps, gemv.config.unroll) == (4, 3)


def test_the_model_wants_two_blocks_of_mma_on_each_sm_and_warps_of_large_tiles() -> None:
    problem = Problem(4096, 8960, 1536, "float16")
    times = {
        tuple(vars(c.config).values()): heuristics.predict(c, problem, A100).total
        for c in VARIANTS["fused_mma"].candidates(problem, A100)
    }
    two_blocks = times[128, 64, 32, 4, 2, 2, 8, 0]
    assert two_blocks < times[128, 64, 64, 3, 2, 2, 8, 0]  # of which an SM of 164 KiB has one
    assert two_blocks < times[128, 64, 32, 4, 2, 4, 8, 0]  # eight warps of half the tile


def test_splitting_costs_the_way_out_and_back() -> None:
    problem = Problem(8192, 8192, 256, "float16")
    split = VARIANTS["split_mma"].candidate(problem, A100)
    fused = VARIANTS["fused_mma"].candidate(problem, A100)
    assert split is not None
    assert fused is not None
    crossing = heuristics.predict(split, problem, A100).intermediate
    assert crossing >= 4 * problem.m * problem.n * 4 / A100.bandwidth
    assert heuristics.predict(fused, problem, A100).intermediate == 0
