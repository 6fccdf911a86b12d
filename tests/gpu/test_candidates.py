"""Every candidate of every space against the float64 reference, on poisoned and guarded output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from autodispatch.benchmark import CudaWorkbench
from autodispatch.device import DeviceInfo, usable_cores
from autodispatch.launch import round_up
from autodispatch.problem import ACTIVATIONS, Problem
from autodispatch.variants import VARIANTS, Candidate
from tests.gpu.conftest import DTYPES

pytestmark = pytest.mark.gpu
CUDA_VARIANTS = [n for n, v in VARIANTS.items() if v.kind == "cuda"]


PERSISTENT = ("fused_wgmma", "split_wgmma")  # whose blocks take several tiles


def several_tiles_each(candidate: Candidate, base: Problem, device: DeviceInfo) -> list[tuple[int, int, int]]:
    """Sizes of which every block of a persistent grid has two tiles and some three, with ragged last ones, and of which
    every ring of stages is gone through more than once; none for what takes one tile per block."""
    values = candidate.config.__dict__
    if candidate.variant.name not in PERSISTENT or values.get("cooperative") == 2:
        return []
    for tiles_m in (10, 4, 3, 2, 1):
        rows, columns = (tiles_m - 1) * values["tile_m"] + 5, (2 * device.sm_count // tiles_m + 2) * values["tile_n"]
        if candidate.is_legal(replace(base, m=rows, n=columns + 16, k=584), device):
            return [(rows, columns + 16, 584)]
    raise AssertionError(f"no size of several tiles is legal for {candidate}")


def sizes(candidate: Candidate, base: Problem, device: DeviceInfo) -> list[tuple[int, int, int]]:
    """One of all, few rows, and around the tile in every direction, with ragged and whole last tiles."""
    values = candidate.config.__dict__
    m, n, k = values.get("tile_m", 64), values.get("tile_n", 64), values.get("tile_k", 64)
    stages, sharers = values.get("num_stages", 2), values.get("groups_k", 1) * values.get("cluster_k", 1)
    found = [
        (1, 1, 1),
        (max(m - 1, 1), n + 1, k + 1),
        (m + 1, n - 1, 2 * k - 1),
        (m, 2 * n, k),
        (2 * m + 3, 2 * n + 9, stages * k + 33),
        (2 * m + 3, 2 * n + 9, (stages + 3) * sharers * k),  # whole stages only; then some sharers have one more
        (m, 2 * n, ((stages + 1) * sharers + 1) * k),
        (min(m, 2), 511, 1031),
    ]
    if m >= 192 or values.get("group_m", 0) > 8:
        found += [(9 * m + 8, n + 1, 72), (17 * m + 3, 2 * n + 9, k + 8)]
    found += several_tiles_each(candidate, base, device)
    if values.get("tail_m"):  # one round of whole tiles and a few small ones; two rounds, of two rows of tiles
        found += [(m - 3, (device.sm_count + 2) * n + 25, 17 * k + 8), (m + 5, (device.sm_count + 3) * n + 8, 16 * k)]
    if "wgmma" in candidate.variant.name:  # which take n and k in multiples of 8 only
        found = [(m, round_up(n, 8), round_up(k, 8)) for m, n, k in found]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("name", CUDA_VARIANTS)
def test_every_config_is_right_on_sizes_around_its_tile(
    device: DeviceInfo, request: pytest.FixtureRequest, name: str, layout: str, dtype: str
) -> None:
    tf32 = dtype == "float32" and name in ("fused_mma", "split_mma")
    base = Problem(1, 64, 64, dtype, layout, precision="tf32" if tf32 else "ieee")
    variant = VARIANTS[name]
    if variant.unmet(base, device):
        assert dtype == "float32" and ("wgmma" in name or name == "fused_decode")
        return
    some = [replace(base, m=m) for m in (1, 2, 8, 16, 32, 64, 150, 400, 4096)]
    some += [replace(base, m=m, n=(device.sm_count + 4) * 64) for m in (64, 128)]
    candidates = list({c.key: c for problem in some for c in variant.candidates(problem, device)}.values())
    candidates = candidates[:: request.config.getoption("--every")]
    assert candidates
    bench = CudaWorkbench(device)
    jobs: dict[Problem, list[Candidate]] = {}
    builds = []
    for candidate in candidates:
        legal = [
            p
            for m, n, k in sizes(candidate, base, device)
            if candidate.is_legal(p := replace(base, m=m, n=n, k=k), device)
        ]
        assert len(legal) >= 2, candidate
        builds.append((candidate, legal[0]))
        for problem in legal:
            jobs.setdefault(problem, []).append(candidate)
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(lambda b: b[0].executable(b[1], device), builds))
    for problem, chosen in jobs.items():
        bench.load(problem, copies=0)
        for candidate in chosen:
            check = bench.check(candidate.executable(problem, device))
            assert check.status == "ok", f"{candidate} on {problem}: {check.reason}"
    bench.unload()


@pytest.mark.parametrize("alignment", [2, 4, 8])
@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_rows_and_pointers_are_right_in_every_variant_that_takes_them(
    device: DeviceInfo, dtype: str, layout: str, alignment: int
) -> None:
    if dtype == "float32" and alignment == 2:
        with pytest.raises(ValueError, match="alignment must be 4"):
            Problem(33, 65, 47, dtype, layout, alignment)
        return
    bench = CudaWorkbench(device)
    for m, k in ((1, 47), (2, 47), (33, 47), (5, 583)):  # the last is shared by the warps and blocks that do so
        problem = Problem(m, 65, k, dtype, layout, alignment)
        bench.load(problem, copies=0)
        served = [c for v in VARIANTS.values() for c in v.candidates(problem, device)]
        some = {"fused_decode"} if dtype != "float32" else set()
        some |= {"fused_gemv"} if m <= 2 else set()
        assert {"fused_simt", "split_simt", "split_cublas", *some} == {c.variant.name for c in served}
        for candidate in {*served[::7], *{c.variant.name: c for c in served}.values()}:
            check = bench.check(candidate.executable(problem, device))
            assert check.status == "ok", f"{candidate}: {check.reason}"


def assert_twenty_repeats_are_identical(bench: CudaWorkbench, candidate: Candidate, problem: Problem) -> None:
    executable = candidate.executable(problem, bench.device)
    results = set()
    for _ in range(20):
        check = bench.check(executable)
        assert check.status == "ok", f"{candidate}: {check.reason}"
        results.add(bench.result().tobytes())
    assert len(results) == 1, candidate


@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_repeats_are_bitwise_identical(device: DeviceInfo, cupy: Any, dtype: str) -> None:
    bench = CudaWorkbench(device)
    candidates = []
    for k in (520, 4096):  # the first ends within a stage, the second with one
        several = [(n, Problem(2 if n == "fused_gemv" else 130, 200, k, dtype)) for n in CUDA_VARIANTS]
        candidates += [(problem, VARIANTS[name].candidate(problem, device)) for name, problem in several]
        shared_k = Problem(16, 64, k, dtype)  # by warps, and by the blocks of a cluster
        candidates += [(shared_k, c) for c in list(VARIANTS["fused_decode"].candidates(shared_k, device))[::9]]
    for problem, candidate in candidates:
        if candidate is None:
            continue
        bench.load(problem, copies=0)
        assert_twenty_repeats_are_identical(bench, candidate, problem)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize("name", [n for n in CUDA_VARIANTS if "wgmma" in n])
def test_twenty_repeats_over_the_wgmma_configs_are_bitwise_identical(
    device: DeviceInfo, name: str, layout: str
) -> None:
    base = Problem(400, 6352, 584, "bfloat16", layout)
    if VARIANTS[name].unmet(base, device):
        assert device.compute_capability != (9, 0)
        return
    bench = CudaWorkbench(device)
    for m in (100, 400):
        problem = replace(base, m=m)
        candidates = list(VARIANTS[name].candidates(problem, device))
        several = [c for c in candidates if c.variant.work(c.config, problem).blocks > device.sm_count]
        assert name not in PERSISTENT or m == 100 or len(several) >= 4
        chosen = candidates[:: 6 if m == 400 else 12]
        if name in PERSISTENT and m == 400:  # blocks with several tiles
            chosen = list(dict.fromkeys((*chosen, *several[:: max(1, len(several) // 8)])))
        if chosen:
            bench.load(problem, copies=0)
        for candidate in chosen:
            assert_twenty_repeats_are_identical(bench, candidate, problem)
    bench.unload()


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_has_every_activation(device: DeviceInfo, dtype: str, activation: str) -> None:
    problem = Problem(5, 136, 264, dtype, "nk", activation=activation)
    bench = CudaWorkbench(device)
    bench.load(problem, copies=0)
    candidates = [c for v in VARIANTS.values() if (c := v.candidate(problem, device))]
    assert len(candidates) >= 3
    for candidate in candidates:
        check = bench.check(candidate.executable(problem, device))
        assert check.status == "ok", f"{candidate}: {check.reason}"
    bench.unload()


def test_fast_math_keeps_its_own_tolerance_and_is_refused_unasked(device: DeviceInfo) -> None:
    exact = Problem(70, 136, 264, "bfloat16")
    fast = replace(exact, math="fast")
    bench = CudaWorkbench(device)
    bench.load(fast, copies=0)
    for name in ("split_mma", "split_wgmma", "split_cublas"):
        variant = VARIANTS[name]
        if variant.unmet(fast, device):
            assert name == "split_wgmma" and device.compute_capability != (9, 0)
            continue
        rounded = [c for c in variant.candidates(fast, device) if '"bfloat16"' in c.config.to_json()]
        assert rounded
        assert not [c for c in variant.candidates(exact, device) if '"bfloat16"' in c.config.to_json()]
        for candidate in rounded:
            check = bench.check(candidate.executable(fast, device))
            assert check.status == "ok", f"{candidate}: {check.reason}"


def test_tf32_is_only_used_where_the_caller_allows_it(device: DeviceInfo) -> None:
    ieee = Problem(256, 256, 2048, "float32")
    errors = {}
    for problem in (ieee, replace(ieee, precision="tf32")):
        bench = CudaWorkbench(device)
        bench.load(problem, copies=0)
        candidate = VARIANTS["split_cublas"].candidate(problem, device)
        assert candidate is not None
        check = bench.check(candidate.executable(problem, device))
        assert check.status == "ok", check.reason
        errors[problem.precision] = check.relative_error
    assert errors["ieee"] < 1e-6 < errors["tf32"]
