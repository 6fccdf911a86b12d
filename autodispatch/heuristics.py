"""The cost model for problems that were never tuned: which candidate should be fast, from the device's attributes.

Time = launches + the longest of arithmetic (whole tiles, shared out over the SMs, or the turns of the main loop where
these take longer), L2 traffic (each block reads its rows of `a` and its columns of the weights) and global memory + the
split path's way out and back for c1 and c2.
Kernels that stream the weights and kernels by wgmma have models of their own, below.

Rates follow from compute capability, SM count, clock and memory bandwidth. The few constants in cycles or microseconds
were measured on an H200; they are properties of the kernels more than of the card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from autodispatch.device import DeviceInfo
from autodispatch.launch import ceil_div
from autodispatch.problem import Problem
from autodispatch.variants.base import FUSED, Candidate, Unit, Work

LAUNCH_S = 3e-6
_LINE_BYTES = 128
_BYTES_LATENCY_S = 0.9e-6  # a request to global memory under load; with the bytes in flight it bounds small grids
_SHORT_ROWS_COST = 1.4  # of weights read in pieces shorter than a line
_STEP_CYCLES = 440.0  # one turn of a main loop by mma.sync that waits for its data

# kernels whose blocks walk k together, behind a barrier per step
_L2_BYTES_PER_CLOCK_AND_SM = 48.0
_BLOCK_BARRIER_S = 3.5e-6  # what they lose to a kernel that streams, where memory is the bound

# kernels by mma.sync, of their best: two blocks per SM of four warps with 64 x 64 outputs of both products
_MMA_WARP_TILE, _MMA_WARP_TILE_POWER = 4096, 0.37
_MMA_WARPS_PER_SM, _MMA_WARPS_POWER = 8, 0.3
_MMA_ONE_BLOCK, _MMA_SHORT_STAGES, _MMA_APART = 0.97, 0.95, 0.84

# kernels that stream the weights
_STREAM_L2_BYTES_PER_CLOCK_AND_SM = 32.0  # into the busiest SM, where the rows of a come again for every block
_STREAM_FLOPS_PER_CLOCK = 450.0  # of one SM
_STREAM_LATENCY_S = 1.2e-6
_STREAM_LATENCY_SHARE = 0.25  # of its steps' latency that the other groups of warps do not hide
_HALF_LINES_COST, _QUARTER_LINES_COST = 1.25, 2.0
_SHORTEST_WAVE = 0.67  # of a wave that fills the GPU
_GEMV_IN_FLIGHT_BYTES = 16 << 10  # of one block, in registers
_GEMV_SAVED_S = 0.7e-6  # there is no ring to fill, and no group's sums to wait for
_GEMV_LATENCY_SHARE = 0.4  # of its steps' latency that other warps do not hide

# kernels by wgmma
_WGMMA_PRODUCTS_PER_CLOCK = 2048.0  # multiply-adds per SM
_WGMMA_FIXED_CYCLES = 10_000.0  # measured on an H200; docs/kernels.md takes it apart
_EXPOSED_STORE_CYCLES = 3_300.0  # of a 128 x 128 tile, measured likewise
_SUSTAINED_CLOCK = 0.93  # under the load of the tensor cores, and less where small tiles move more bytes:
_BYTES_POWER_COST = 12.0  # times 1 / rows + 1 / columns of the tile
_HALF_BOX_COST = 2.5  # of columns in boxes under 128 bytes
_SPLIT_LINES_COST = 1.06  # in global memory, of boxes that do not begin at lines
_BOX_BYTES_PER_CLOCK = {128: 64.0, 64: 48.0, 32: 36.0, 1: 22.0}  # from L2, by the alignment of the weights' boxes
_PERSISTENT_STEP_CYCLES, _SMALL_STEP_CYCLES = 340.0, 560.0  # at least, per 64 of k
_FEW_STAGES_COST, _FEW_SMALL_STAGES_COST = 1.15, 1.06  # of fewer than four
_QUEUE_S = 2.2e-6  # of global memory: for the bytes under way that (k, n) weights and tiles of few rows want
_SHORT_QUEUE_COST = 0.45  # of a queue that is empty, relative to the time at memory's pace
_LONG_QUEUE_COST = 600.0  # of one twice as long as wanted, likewise, over k: it is paid once, however long k is
_FEW_ROWS_KN_PACE, _FEW_ROWS_KN_START_S = 0.95, 1e-6  # of memory's time, and off the fixed part, for (k, n), few rows
_ONE_WAVE_S = 1e-6  # small tiles of which no SM has a second whose loads could overlap with the first one's store


@dataclass(frozen=True)
class Estimate:
    """A predicted time in seconds and the share of each resource, also in seconds."""

    total: float
    launches: float
    arithmetic: float
    l2: float
    memory: float
    intermediate: float

    @property
    def bound(self) -> str:
        parts = {"arithmetic": self.arithmetic, "L2": self.l2, "memory": self.memory, "launches": self.launches}
        return max(parts, key=lambda name: parts[name])


def predict(candidate: Candidate, problem: Problem, device: DeviceInfo) -> Estimate:
    """The candidate's expected time for a problem on a device."""
    work = candidate.variant.work(candidate.config, problem)
    if device.kind == "cpu":
        return _predict_cpu(candidate, work, problem, device)
    clock = device.clock_khz * 1e3 or 1.5e9
    bandwidth = 0.88 * device.bandwidth or 5e11
    if work.unit in (Unit.WGMMA, Unit.WGMMA_COOPERATIVE, Unit.WGMMA_SMALL):
        return _predict_wgmma(candidate, work, problem, device, clock, bandwidth)
    if work.unit in (Unit.DECODE, Unit.GEMV):
        return _predict_stream(work, problem, device, clock, bandwidth)
    per_sm = ceil_div(work.blocks, device.sm_count)
    rounds = work.blocks // device.sm_count + work.tail if work.tail else per_sm
    tile_flops = 2.0 * work.products * work.tile_m * work.tile_n * problem.k
    arithmetic = rounds * tile_flops / (_flops_per_clock(work, problem, device) * clock)
    reads = work.blocks * (work.tile_m + work.products * work.tile_n) * problem.k * problem.item_bytes
    active = min(work.blocks, device.sm_count)
    l2 = reads / (_L2_BYTES_PER_CLOCK_AND_SM * clock * active)
    resident = min(per_sm, _blocks_per_sm(work, device))
    in_flight = active * resident * (work.shared_bytes or 4096)
    memory = problem.bytes_moved / min(bandwidth, in_flight / _BYTES_LATENCY_S)
    if work.row_bytes < _LINE_BYTES:
        memory *= _SHORT_ROWS_COST
    latency = ceil_div(per_sm, resident) * work.steps * _STEP_CYCLES / clock
    intermediate = _crossing(candidate, problem, device, bandwidth)
    launches = work.launches * LAUNCH_S + (_BLOCK_BARRIER_S if work.unit is Unit.TENSOR else 0.0)
    return _estimate(launches, max(arithmetic, latency), l2, memory, intermediate)


def _predict_stream(work: Work, problem: Problem, device: DeviceInfo, clock: float, bandwidth: float) -> Estimate:
    """A kernel that streams the weights: by memory, unless its blocks are too few, too narrow or, with a ring, in an
    odd number of waves, or the SM that has most of them cannot be fed or does not keep up."""
    per_sm = ceil_div(work.blocks, device.sm_count)
    resident = min(per_sm, _blocks_per_sm(work, device))
    k = problem.k / work.sharers
    tile_flops = 2.0 * work.products * work.tile_m * work.tile_n * k
    arithmetic = per_sm * tile_flops / (_flops_per_clock(work, problem, device) * clock)
    tile_bytes = (work.tile_m + work.products * work.tile_n) * k * problem.item_bytes
    l2 = per_sm * tile_bytes / (_STREAM_L2_BYTES_PER_CLOCK_AND_SM * clock)
    ring = work.shared_bytes * (1 - 1 / work.stages) if work.stages else _GEMV_IN_FLIGHT_BYTES
    in_flight = min(work.blocks, device.sm_count) * resident * ring
    memory = problem.bytes_moved / min(bandwidth, in_flight / _STREAM_LATENCY_S)
    if work.row_bytes < _LINE_BYTES:
        cost = _HALF_LINES_COST if 2 * work.row_bytes >= _LINE_BYTES else _QUARTER_LINES_COST
        memory, l2 = memory * cost, l2 * cost
    latency = ceil_div(per_sm, resident) * work.steps * _STEP_CYCLES / clock
    if work.unit is Unit.GEMV:  # its blocks end at different times: no last wave is seen, and what a warp waits adds up
        return _estimate(LAUNCH_S - _GEMV_SAVED_S + _GEMV_LATENCY_SHARE * latency, arithmetic, l2, memory)
    if per_sm > resident:  # a last wave of few blocks cannot draw the whole bandwidth
        waves = work.blocks / (device.sm_count * resident)
        memory *= (waves // 1 + max(waves % 1, _SHORTEST_WAVE)) / waves
    return _estimate(LAUNCH_S, arithmetic + _STREAM_LATENCY_SHARE * latency, l2, memory)


def _predict_wgmma(
    candidate: Candidate, work: Work, problem: Problem, device: DeviceInfo, clock: float, bandwidth: float
) -> Estimate:
    """A kernel that keeps the tensor cores busy: whole rounds of tiles at their peak, and a fixed part for the first
    bytes and the last store. Where a persistent one streams the weights, SMs without a tile cost bandwidth, by the
    square root of their share; where tiles are small, L2 feeds them, and a last round of few blocks leaves bandwidth
    unused. A cooperative tile's store is not hidden. Of several small blocks per SM, what counts is the SM that has
    most of them to feed.
    """
    rounds = ceil_div(work.blocks, device.sm_count)
    small = work.unit is Unit.WGMMA_SMALL
    step = max(64, work.tile_m) * work.products * work.tile_n * 64 / _WGMMA_PRODUCTS_PER_CLOCK
    shortest = _SMALL_STEP_CYCLES if small else rounds * _PERSISTENT_STEP_CYCLES
    cycles = max(rounds * step, shortest) * ceil_div(problem.k, 64)
    if work.unit is not Unit.WGMMA:
        cycles += rounds * _EXPOSED_STORE_CYCLES * work.tile_m * work.tile_n / 128**2
    if not small and work.stages < 4:
        cycles *= _FEW_STAGES_COST
    row_bytes = problem.item_bytes * (64 if problem.layout == "nk" else work.tile_n)  # between the boxes of neighbours
    aligned = next(x for x in (_LINE_BYTES, 64, 32, 1) if row_bytes % x == 0)
    columns = work.products * work.tile_n / (1.0 if aligned == _LINE_BYTES else _HALF_BOX_COST)
    cycles *= 1.0 + _BYTES_POWER_COST * (1.0 / max(64, work.tile_m) + 1.0 / columns)
    arithmetic = cycles / (_SUSTAINED_CLOCK * clock)
    tile_bytes = (work.tile_m + work.products * (work.loaded_n or work.tile_n)) * problem.k * problem.item_bytes
    l2_rate = clock * min(_BOX_BYTES_PER_CLOCK[aligned], 48.0 if small else 64.0)
    memory = problem.bytes_moved / bandwidth * (_queue_cost(work, problem, device, bandwidth) if small else 1.0)
    memory *= 1.0 if aligned == _LINE_BYTES else _SPLIT_LINES_COST
    launches = (work.launches - 1) * LAUNCH_S + _WGMMA_FIXED_CYCLES / clock
    if small:
        last = work.blocks % (device.sm_count * _blocks_per_sm(work, device))
        if last < work.blocks:  # behind whole rounds the last one takes all its time, however few bytes it draws
            memory += max(0.0, arithmetic * ceil_div(last, device.sm_count) / rounds - memory * last / work.blocks)
        l2 = rounds * tile_bytes / l2_rate
        launches += _ONE_WAVE_S if rounds == 1 else 0.0
        launches -= _FEW_ROWS_KN_START_S if _is_few_rows_kn(work, problem) else 0.0
    else:
        l2 = work.blocks * tile_bytes / (l2_rate * min(work.blocks, device.sm_count))
        memory /= (work.blocks / (rounds * device.sm_count)) ** 0.5
    return _estimate(launches, arithmetic, l2, memory, _crossing(candidate, problem, device, bandwidth))


def _queue_cost(work: Work, problem: Problem, device: DeviceInfo, bandwidth: float) -> float:
    """The factor on memory's time for the bytes that a kernel of small tiles has under way: too few cost, and with
    (k, n) weights and few rows too many do."""
    if not _is_few_rows_kn(work, problem):
        return _FEW_SMALL_STAGES_COST if work.stages < 4 else 1.0
    columns = work.products * (work.loaded_n or work.tile_n)
    resident = min(work.blocks, device.sm_count * _blocks_per_sm(work, device))
    under_way = resident * work.stages * columns * 64 * problem.item_bytes / (bandwidth * _QUEUE_S)
    away = under_way - 1.0
    cost = -_SHORT_QUEUE_COST * away if away < 0.0 else _LONG_QUEUE_COST * away / max(problem.k, 1)
    return _FEW_ROWS_KN_PACE * (1.0 + cost)


def _is_few_rows_kn(work: Work, problem: Problem) -> bool:
    return problem.layout == "kn" and work.tile_m <= 64


def _estimate(launches: float, arithmetic: float, l2: float, memory: float, intermediate: float = 0.0) -> Estimate:
    total = launches + _longest(arithmetic, l2, memory) + intermediate
    return Estimate(total, launches, arithmetic, l2, memory, intermediate)


def _longest(*seconds: float) -> float:
    """The longest of what goes on at the same time, and a little of the rest, which is never hidden whole."""
    return 0.97 * max(seconds) + 0.03 * sum(seconds)


def _crossing(candidate: Candidate, problem: Problem, device: DeviceInfo, bandwidth: float) -> float:
    """Seconds for c1 and c2 on their way out and back; what fits into L2 comes back from there."""
    if candidate.variant.path == FUSED:
        return 0.0
    nbytes = 2.0 * candidate.variant.workspace_bytes(candidate.config, problem)
    return nbytes / bandwidth * (1.0 if nbytes / 2 > device.l2_bytes / 2 else 0.4)


def rank(candidates: Iterable[Candidate], problem: Problem, device: DeviceInfo) -> list[Candidate]:
    """The candidates, fastest by the model first; equal ones in the order of their keys."""
    return sorted(candidates, key=lambda c: (predict(c, problem, device).total, c.key))


def near_best(ranked: Sequence[Candidate], factor: float, problem: Problem, device: DeviceInfo) -> Iterator[Candidate]:
    """Of candidates by rank, those expected to take at most `factor` times the first one's time."""
    most = factor * predict(ranked[0], problem, device).total if ranked else 0.0
    return takewhile(lambda c: predict(c, problem, device).total <= most, ranked)


def waves(work: Work, device: DeviceInfo) -> float:
    """How many times a kernel's blocks fill all places that the SMs have for them, by its registers as far as known."""
    return work.blocks / (max(device.sm_count, 1) * _blocks_per_sm(work, device))


def _blocks_per_sm(work: Work, device: DeviceInfo) -> int:
    by_threads = device.threads_per_sm // work.threads
    by_shared = device.shared_bytes_per_sm // (work.shared_bytes + 1024)
    registers = work.registers or work.products * work.tile_m * work.tile_n // work.threads + 64
    by_registers = device.registers_per_sm // (work.threads * min(255, registers))
    return max(1, min(by_threads, by_shared, by_registers))


def peaks(problem: Problem, device: DeviceInfo) -> tuple[float, float]:
    """The device's peaks for a problem's type at its highest clock: operations and bytes per second; 0 if not known."""
    if device.kind == "cpu":
        return 0.0, 0.0
    fp32 = problem.dtype == "float32" and problem.precision == "ieee"
    per_clock = _fp32_peak(device) if fp32 else _tensor_peak(problem, device)
    return per_clock * device.sm_count * device.clock_khz * 1e3, device.bandwidth


def _fp32_peak(device: DeviceInfo) -> float:
    """Operations per clock and SM."""
    return 2.0 * (64 if device.compute_capability < (8, 6) else 128)


def _tensor_peak(problem: Problem, device: DeviceInfo) -> float:
    """Operations per clock and SM."""
    cc = device.compute_capability
    if cc < (8, 0):
        tensor = 1024.0
    elif cc == (8, 0):
        tensor = 2048.0
    else:
        tensor = 4096.0 if (9, 0) <= cc < (12, 0) else 1024.0
    return tensor / 2 if problem.dtype == "float32" else tensor  # tf32


def _flops_per_clock(work: Work, problem: Problem, device: DeviceInfo) -> float:
    """Sustained operations per clock and SM: the units' peak times what such a kernel reaches of it."""
    cc = device.compute_capability
    fp32, tensor = _fp32_peak(device), _tensor_peak(problem, device)
    if work.unit is Unit.LIBRARY:
        return 0.75 * (fp32 if problem.dtype == "float32" and problem.precision == "ieee" else tensor)
    if work.unit is Unit.FP32:
        return 0.6 * fp32
    if work.unit is Unit.GEMV:
        return 0.12 * fp32
    if work.unit is Unit.DECODE:
        return _STREAM_FLOPS_PER_CLOCK
    # mma.sync reaches about half of what wgmma does where the latter exists
    reach = 0.46 if (9, 0) <= cc < (12, 0) else 0.8
    return reach * tensor * _share_of_mma(work, device)


def _share_of_mma(work: Work, device: DeviceInfo) -> float:
    """What a kernel by mma.sync reaches of the best of them: less where a warp's tile is small and waits for shared
    memory, where few warps leave gaps, where all of them wait at one barrier, where stages are short, and where warps
    are apart."""
    warps = ceil_div(work.threads, 32)
    resident = min(float(_blocks_per_sm(work, device)), max(1.0, work.blocks / device.sm_count))
    share = min(1.0, (work.products * work.tile_m * work.tile_n / warps / _MMA_WARP_TILE) ** _MMA_WARP_TILE_POWER)
    share *= min(1.0, (warps * resident / _MMA_WARPS_PER_SM) ** _MMA_WARPS_POWER)
    if resident < 2 and warps >= _MMA_WARPS_PER_SM:
        share *= _MMA_ONE_BLOCK
    if work.step_bytes <= 64:
        share *= _MMA_SHORT_STAGES
    return float(share * (_MMA_APART if work.apart else 1.0))


def _predict_cpu(candidate: Candidate, work: Work, problem: Problem, device: DeviceInfo) -> Estimate:
    arithmetic = problem.flops / (4e10 * device.sm_count)
    memory = problem.bytes_moved / 1e10
    block_bytes = 8.0 * min(work.tile_m, problem.m) * min(work.tile_n, problem.n)
    # products that outgrow the last-level cache go out and come back, several times over in NumPy
    intermediate = 0.0 if block_bytes < 4e6 else 4.0 * 8.0 * problem.m * problem.n / 1e10
    launches = 15e-6 * work.blocks
    total = launches + max(arithmetic, memory) + intermediate
    return Estimate(total, launches, arithmetic, 0.0, memory, intermediate)
