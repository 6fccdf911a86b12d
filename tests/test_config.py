"""Config spaces: what a device allows is read off its attributes, and what is stored can be read back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autodispatch import exchange
from autodispatch.device import DeviceInfo
from autodispatch.problem import Problem
from autodispatch.records import MeasurementRecord
from autodispatch.store import TuningStore
from autodispatch.variants import VARIANTS, Registry
from autodispatch.variants.fused_mma import FusedMmaConfig
from tests.fakes import A100, GPUS, H200, KIB, RTX3090, T4, like
from tests.stored import SEEDS

REGISTRY = Registry()
PROBLEMS = [
    Problem(m, 8960, 1536, dtype, layout)
    for m in (1, 17, 64, 4096)
    for dtype in ("float32", "float16", "bfloat16")
    for layout in ("kn", "nk")
]


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.key)
def test_every_problem_has_candidates_of_both_paths_and_legal_defaults(device: DeviceInfo) -> None:
    for problem in PROBLEMS:
        candidates = list(REGISTRY.candidates(problem, device))
        assert {c.variant.path for c in candidates} == {"split", "fused"}
        for default in REGISTRY.defaults(problem, device):
            assert default in candidates, f"{default} for {problem}"


def test_shared_memory_limits_the_space() -> None:
    problem = Problem(4096, 4096, 4096, "float16")
    wide = list(VARIANTS["fused_mma"].candidates(problem, H200))
    narrow = list(VARIANTS["fused_mma"].candidates(problem, RTX3090))
    assert set(narrow) < set(wide)
    assert all(c.config.shared_bytes(2, 2, 2) <= 99 * KIB for c in narrow)  # type: ignore[attr-defined]


def test_bfloat16_needs_compute_capability_8_on_tensor_cores_and_is_served_below_it() -> None:
    problem = Problem(64, 64, 64, "bfloat16")
    assert VARIANTS["fused_mma"].unmet(problem, T4) == ["compute capability 7.5 for float16, 8.0 for the others"]
    assert VARIANTS["fused_mma"].unmet(problem, A100) == []
    assert {c.variant.name for c in REGISTRY.candidates(problem, T4)} == {"fused_simt", "split_simt"}


def test_float32_and_misaligned_problems_go_to_the_variants_that_take_them() -> None:
    for problem, more in (
        (Problem(64, 64, 64, "float32"), set()),
        (Problem(64, 63, 64, "float16", alignment=2), {"fused_decode"}),
        (Problem(2, 63, 64, "float16", alignment=2), {"fused_decode", "fused_gemv"}),
        (Problem(2, 63, 64, "float32", alignment=4), {"fused_gemv"}),
    ):
        served = {c.variant.name for c in REGISTRY.candidates(problem, H200)}
        assert served == {"fused_simt", "split_simt", "split_cublas", *more}


def test_bfloat16_intermediates_are_only_there_where_the_caller_allows_them() -> None:
    exact = Problem(64, 64, 64, "bfloat16")
    for problem, expected in (
        (exact, 0),
        (replace(exact, math="fast"), 1),
        (Problem(64, 64, 64, "float16", math="fast"), 0),
    ):
        rounded = [c for c in REGISTRY.candidates(problem, H200) if '"intermediate":"bfloat16"' in c.config.to_json()]
        assert bool(rounded) == bool(expected)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_stored_config_reads_back_as_the_same_candidate(name: str) -> None:
    variant = VARIANTS[name]
    for config in variant.space:
        candidate = REGISTRY.parse(name, config.to_json())
        assert candidate.config == config
        assert candidate.variant is variant


OTHER_TUNABLES = '"tile_n":64,"tile_k":32,"num_stages":4,"warps_m":1,"warps_n":4,"group_m":8,"tail_m":0'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "config must name tile_m"),
        ("[]", "config must name tile_m"),
        ('{"tile_m":16}', "config must name tile_m"),
        (f'{{"tile_m":16.0,{OTHER_TUNABLES}}}', r"tile_m must be one of .*got 16\.0"),
        (f'{{"tile_m":17,{OTHER_TUNABLES}}}', "tile_m must be one of .*got 17"),
    ],
)
def test_a_config_outside_the_space_is_refused(text: str, message: str) -> None:
    assert REGISTRY.parse("fused_mma", f'{{"tile_m":16,{OTHER_TUNABLES}}}')
    with pytest.raises(ValueError, match=message):
        REGISTRY.parse("fused_mma", text)
    with pytest.raises(ValueError, match="variant must be one of"):
        REGISTRY.parse('"); system("', text)


def tails(problem: Problem, device: DeviceInfo) -> dict[tuple[int, int], FusedMmaConfig]:
    found = [c.config for c in VARIANTS["fused_mma"].candidates(problem, device)]
    return {(c.tile_m, c.tail_m): c for c in found if isinstance(c, FusedMmaConfig) and c.tail_m}


@pytest.mark.parametrize("device", [H200, A100, RTX3090], ids=lambda d: d.key)
def test_a_tail_of_small_tiles_fills_a_last_round_of_few_whole_ones(device: DeviceInfo) -> None:
    columns = 64
    problem = Problem(128, (device.sm_count + 4) * columns + 8, 1536, "bfloat16")
    found = tails(problem, device)
    assert set(found) == {(128, 64), (128, 32), (64, 32)}
    for config in found.values():
        whole = config.whole_columns(problem, device)
        assert whole * (problem.m // config.tile_m) % device.sm_count == 0
        assert 0 < config.tail_blocks(problem, device) <= device.sm_count
    # one round that is full, and a last one that many tiles fill
    assert not tails(replace(problem, n=device.sm_count * columns), device)
    assert not tails(replace(problem, n=2 * device.sm_count * columns - columns), device)
    assert not tails(replace(problem, n=columns), device)


@pytest.mark.parametrize(("rounds", "beyond"), [(1, 1), (1, 25), (2, 200), (3, 64), (7, 130)])
@pytest.mark.parametrize("m", [65, 128, 200, 333])
def test_whole_and_small_tiles_cover_every_output_once(m: int, rounds: int, beyond: int) -> None:
    tile_rows = -(-m // 128)
    problem = Problem(m, (rounds * H200.sm_count // tile_rows + 1) * 64 + beyond, 72, "bfloat16")
    found = tails(problem, H200)
    assert found
    for config in found.values():
        covered = np.zeros((problem.m, problem.n), np.int8)
        columns, blocks = config.whole_columns(problem, H200), config.tail_blocks(problem, H200)
        rows, small_rows = -(-m // config.tile_m), -(-m // config.tail_m)
        for i in range(rows * columns + blocks):  # as in kernels/fused_mma.cu, but for the order within
            if i < rows * columns:
                height, width, row, column = config.tile_m, config.tile_n, i % rows, i // rows
            else:
                height, width = config.tail_m, config.tile_n // 2
                row, column = (i - rows * columns) % small_rows, 2 * columns + (i - rows * columns) // small_rows
            covered[row * height : (row + 1) * height, column * width : (column + 1) * width] += 1
        assert (covered == 1).all()


def test_tails_are_left_to_16_bit_elements_and_few_rounds() -> None:
    problem = Problem(128, (H200.sm_count + 4) * 64, 1536, "float16")
    assert tails(problem, H200)
    assert not tails(replace(problem, dtype="float32", precision="tf32"), H200)
    assert not tails(replace(problem, n=(9 * H200.sm_count + 4) * 64), H200)
    assert not tails(problem, like(T4, sm_count=H200.sm_count))


@pytest.mark.parametrize("k", [8, 256, 896, 1000, 1536, 2048, 2880, 3584, 4096, 8192])
@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_fused_gemv_counts_how_often_its_slowest_lanes_wait(layout: str, k: int) -> None:
    """Beside the kernel's own loops, lane by lane: whole steps of a warp, then single vectors or rows; lanes of one
    warp that part there wait for one another."""
    problem = Problem(1, 256, k, "bfloat16", layout)
    for candidate in VARIANTS["fused_gemv"].candidates(problem, H200):
        config = vars(candidate.config)
        unroll, lanes = config["unroll"], 32 if layout == "nk" else 2 * config["warps"]
        if layout == "nk":  # vectors of 8, a warp's width apart
            own, needed, advance, single, most = 8, (unroll - 1) * 256 + 8, unroll * 256, 256, k
        else:  # rows, `unroll` of each lane next to one another
            own, needed, advance, single, most = unroll, unroll, lanes * unroll, 1, unroll
        whole, singles = [], []
        for lane in range(lanes):
            starts = [d for d in range(lane * own, k, advance) if d + needed <= k]
            left = lane * own + len(starts) * advance
            whole.append(len(starts))
            singles.append(len(range(left, min(k, left + most), single)))
        waits = max(whole) + max(singles)
        steps = candidate.variant.work(candidate.config, problem).steps
        assert waits - 1 <= steps <= waits + 1, candidate
        assert steps == waits or k % (256 if layout == "nk" else advance), candidate


def test_the_registers_of_fused_gemv_are_about_those_that_were_recorded() -> None:
    store = TuningStore()
    for path in SEEDS:
        exchange.import_file(store, path)
    found = [m for m in store.all_of(MeasurementRecord) if m.variant == "fused_gemv" and m.problem.dtype == "bfloat16"]
    assert len(found) >= 4
    for record in found:
        variant = VARIANTS["fused_gemv"]
        registers = variant.work(variant.space.parse(record.config), record.problem).registers
        assert abs(registers - record.registers) <= 2, record


def test_grids_that_cannot_be_launched_are_not_candidates() -> None:
    huge = Problem(2**31 - 1, 2**20, 1, "float16")
    assert {c.variant.name for c in REGISTRY.candidates(huge, H200)} == {"split_cublas"}


def test_digests_differ_between_variants_and_do_not_change_by_themselves() -> None:
    digests = {name: v.digest for name, v in VARIANTS.items()}
    assert digests["fused_mma"] != digests["split_mma"] != digests["fused_simt"]
    assert digests == {name: type(v)().digest for name, v in VARIANTS.items()}


def test_hopper_variants_state_what_the_copy_engine_needs() -> None:
    variant = VARIANTS["fused_wgmma"]
    good = Problem(100, 72, 40, "bfloat16")
    assert variant.unmet(good, H200) == []
    for problem, device, words in (
        (replace(good, n=71), H200, "multiples of 8"),
        (replace(good, k=44), H200, "multiples of 8"),
        (replace(good, alignment=8), H200, "multiples of 16 bytes"),
        (replace(good, dtype="float32"), H200, "float16 or bfloat16"),
        (good, A100, "compute capability 9.0"),
        (good, like(H200, nvrtc_version=(12, 4)), "NVRTC 12.9"),
    ):
        assert words in "; ".join(variant.unmet(problem, device))
    kn = {c.config.tile_n for c in variant.candidates(replace(good, layout="kn"), H200)}  # type: ignore[attr-defined]
    assert kn == {64, 72, 80, 96, 112, 128}
    for layout in ("kn", "nk"):
        for candidate in variant.candidates(replace(good, layout=layout), H200):
            assert candidate.config.shared_bytes(layout) <= H200.shared_bytes_per_block  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [T4, H200], ids=lambda d: d.name)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_asking_fixed_restrictions_once_leaves_the_same_configs(name: str, device: DeviceInfo) -> None:
    space = VARIANTS[name].space
    for problem in (Problem(16, 8960, 1536, "float16"), Problem(4096, 512, 1536, "float16", "nk")):
        asked = [c for c in space if not space.violations(c, problem, device)]
        assert list(space.legal(problem, device)) == asked
