"""Arrays as callers have them: views, misalignment, other libraries, `out`, streams, devices, large sizes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autodispatch.benchmark import CudaWorkbench
from autodispatch.device import cuda_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import LaunchError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.reference import decode
from autodispatch.runner import LocalRunner
from autodispatch.settings import Settings
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Registry
from tests.gpu.conftest import DTYPES

pytestmark = pytest.mark.gpu


@pytest.fixture
def random(array: Callable[..., Any]) -> Callable[..., Any]:
    rng = np.random.default_rng(11)

    def make(rows: int, columns: int, dtype: str = "float16") -> Any:
        return array(rng.normal(0, 0.5, (rows, columns)), dtype)

    return make


def views(
    cupy: Any, random: Callable[..., Any], dtype: str, shape: tuple[int, int, int] = (3, 7, 5)
) -> dict[str, tuple[Any, Any, Any]]:
    """Arguments of one logical shape, each laid out in another way. No two layouts agree by luck."""
    m, n, k = shape
    a, b1, b2 = random(m, k, dtype), random(k, n, dtype), random(k, n, dtype)
    packed = random(k, 2 * n, dtype)
    packed_nk = random(2 * n, k, dtype)
    wide, tall = random(m, 2 * k, dtype), random(2 * m, k, dtype)
    fortran = cupy.asfortranarray(random(m + 2, k, dtype))
    return {
        "contiguous": (a, b1, b2),
        "transposed weights": (a, random(n, k, dtype).T, random(n, k, dtype).T),
        "one weight transposed": (a, random(n, k, dtype).T, b2),
        "the other weight transposed": (a, b1, random(n, k, dtype).T),
        "columns of a wider array": (wide[:, :k], b1, b2),
        "later columns of a wider array": (wide[:, k:], b1, b2),
        "every other row": (tall[::2], b1, b2),
        "rows from the end": (a[::-1], b1, b2),
        "columns from the end": (a, b1[:, ::-1], b2),
        "Fortran order": (cupy.asfortranarray(a), b1, cupy.asfortranarray(b2)),
        "a slice in Fortran order": (fortran[:m], b1, b2),
        "every other column": (wide[:, ::2], b1, random(k, 2 * n, dtype)[:, ::2]),
        "packed weights": (a, packed[:, :n], packed[:, n:]),
        "packed transposed weights": (a, packed_nk[:n].T, packed_nk[n:].T),
        "a broadcast row": (cupy.broadcast_to(a[:1], (m, k)), b1, b2),
        "the same weight twice": (a, b1, b1),
    }


@pytest.mark.parametrize("shape", [(3, 7, 5), (24, 56, 40)], ids=["odd", "aligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_view_is_read_as_the_array_it_stands_for(
    cupy: Any,
    dispatcher: Dispatcher,
    random: Callable[..., Any],
    serving: Callable[..., list[str]],
    assert_right: Callable[..., None],
    dtype: str,
    shape: tuple[int, int, int],
) -> None:
    if shape[0] == 24 and dtype != "float32":
        for case in ("packed weights", "packed transposed weights", "every other row"):
            assert {"fused_mma", "split_mma"} <= set(serving(*views(cupy, random, dtype, shape)[case])), case
    for name, args in views(cupy, random, dtype, shape).items():
        before = [x.copy() for x in args]
        for variant in (None, *serving(*args)):
            out = dispatcher.run(*args, candidate=variant)
            try:
                assert_right(out, *(cupy.ascontiguousarray(x) for x in args))
            except AssertionError as cause:
                raise AssertionError(f"{name} by {variant}: {cause}") from cause
        for x, y in zip(args, before, strict=True):
            assert bool((decode(x) == decode(y)).all()), f"{name}: an input was written"


def test_copies_are_reported(cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any]) -> None:
    cases = views(cupy, random, "float16")
    assert dispatcher.explain(*cases["transposed weights"]).copied == ()
    assert dispatcher.explain(*cases["packed weights"]).copied == ()
    assert [n for n, _ in dispatcher.explain(*cases["rows from the end"]).copied] == ["a"]
    assert [n for n, _ in dispatcher.explain(*cases["one weight transposed"]).copied] == ["b2"]


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_contiguous_but_misaligned_arrays_are_right_even_where_a_tuned_winner_wants_16_bytes(
    cupy: Any,
    dispatcher: Dispatcher,
    random: Callable[..., Any],
    assert_right: Callable[..., None],
    position: int,
) -> None:
    m = n = k = 64
    demanding = Registry({name: VARIANTS[name] for name in ("fused_mma", "split_mma")})
    runner = LocalRunner(CudaWorkbench(cuda_device(0)))
    Tuner(dispatcher.layers.user, runner, demanding).tune(Problem(m, n, k, "float16"))
    aligned = [random(m, k), random(k, n), random(k, n), cupy.empty((m, n), np.float16)]
    dispatcher.run(*aligned[:3], out=aligned[3])
    assert dispatcher.explain(*aligned[:3], out=aligned[3]).selection.candidate.variant.name in demanding.variants
    buffer = cupy.empty(m * k + 1, np.float16)
    view = buffer[1:].reshape(m, k)
    view[...] = aligned[position]
    arguments = [*aligned]
    arguments[position] = view
    assert_right(dispatcher.run(*arguments[:3], out=arguments[3]), *arguments[:3])
    with pytest.raises(UnsupportedProblemError, match="multiples of 16 bytes"):
        dispatcher.run(*arguments[:3], out=arguments[3], candidate="fused_mma")


def test_out_may_have_any_stride_and_nothing_beside_it_is_written(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = random(19, 40), random(40, 24), random(40, 24)
    for make in (
        lambda: cupy.full((21, 64), np.nan, np.float16)[1:20, 16:40],
        lambda: cupy.full((24, 19), np.nan, np.float16).T,
        lambda: cupy.full((38, 48), np.nan, np.float16)[::2, ::2],
        lambda: cupy.full((19, 24), np.nan, np.float16)[::-1],
    ):
        out = make()
        assert dispatcher.run(a, b1, b2, out=out) is out
        assert_right(out, a, b1, b2)
        base = out.base if out.base is not None else out
        assert int(cupy.isfinite(base).sum()) == out.size


def test_out_that_overlaps_is_refused_and_interleaved_views_are_not(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    both = random(16, 64)
    b1, b2 = random(32, 32), random(32, 32)
    with pytest.raises(ValueError, match="out must not overlap a"):
        dispatcher.run(both[:, :32], b1, b2, out=both[:, 16:48])
    square = random(32, 32)
    with pytest.raises(ValueError, match="out must not overlap b2"):
        dispatcher.run(square, b1, b2, out=b2)
    with pytest.raises(ValueError, match="out must not overlap itself"):
        dispatcher.run(both[:, :32], b1, b2, out=cupy.broadcast_to(cupy.zeros(32, np.float16), (16, 32)))
    a = both[:, :32].copy()
    assert_right(dispatcher.run(both[:, :32], b1, b2, out=both[:, 32:]), a, b1, b2)


def test_wrong_arguments_raise_before_anything_is_launched(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any]
) -> None:
    a, b = random(4, 4), random(4, 4)
    single = random(4, 4, "float32")
    for arguments, error, words in (
        ((a, single, b), TypeError, "b1 must have the dtype of a, float16"),
        ((a, b, random(4, 4, "bfloat16")), TypeError, "b2 must have the dtype of a"),
        ((cupy.ones((4, 4)),) * 3, TypeError, "a must have a dtype out of bfloat16, float16, float32"),
        ((cupy.ones((4, 4), np.int8),) * 3, TypeError, "a must have a dtype"),
        ((cupy.ones((4, 4), np.complex64),) * 3, TypeError, "a must have a dtype"),
        ((a, np.ones((4, 4), np.float16), b), TypeError, "b1 must be a CuPy array"),
        ((np.ones((1, 1), np.float16), a[:1, :1], b[:1, :1]), TypeError, "b1 must be a NumPy array"),
        ((a, b, None), TypeError, "b2 must be a CuPy array"),
        ((None, a, b), TypeError, "a must be a CuPy array"),
        ((a, b[:3], b), ValueError, "b1 must have as many rows"),
        ((a, b, b[:, :3]), ValueError, "b2 must have the shape of b1"),
        ((a[0], b, b), ValueError, "a must have 2 dimensions"),
    ):
        with pytest.raises(error, match=words):
            dispatcher.run(*arguments)
    with pytest.raises(ValueError, match="out must have shape"):
        dispatcher.run(a, b, b, out=random(4, 5))
    with pytest.raises(TypeError, match="out must have the dtype"):
        dispatcher.run(a, b, b, out=single)
    for option, value in (("activation", "tanh"), ("math", "sloppy"), ("precision", "fp8"), ("candidate", "nobody")):
        with pytest.raises(ValueError, match=f"{option} must be"):
            dispatcher.run(a, b, b, **{option: value})


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_give_a_torch_tensor_on_the_current_stream(
    cupy: Any, dispatcher: Dispatcher, assert_right: Callable[..., None], dtype: str
) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    a, b1, w = (torch.randn(s, device="cuda").to(kind) for s in ((33, 64), (64, 48), (48, 64)))
    b2 = w.t()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        a.mul_(2)
        out = dispatcher.run(a, b1, b2)
    torch.cuda.synchronize()
    assert isinstance(out, torch.Tensor) and out.dtype == kind and out.is_cuda

    def as_cupy(x: Any) -> Any:
        x = x.contiguous()
        return (
            cupy.from_dlpack(x.view(torch.int16)).view(decode_dtype(dtype)) if dtype == "bfloat16" else cupy.asarray(x)
        )

    assert_right(as_cupy(out), as_cupy(a), as_cupy(b1), as_cupy(b2))
    again = torch.empty_like(out)
    assert dispatcher.run(a, b1, b2, out=again) is again
    assert torch.equal(again, out)


def decode_dtype(name: str) -> Any:
    from autodispatch.reference import dtype_of

    return dtype_of(name)


def test_torch_tensors_that_cannot_be_served_are_refused(dispatcher: Dispatcher) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((4, 4), device="cuda", dtype=torch.float16)
    with pytest.raises(TypeError, match="b1 must be on a GPU"):
        dispatcher.run(x, x.cpu(), x)
    with pytest.raises(UnsupportedProblemError, match="b2 must not require grad"):
        dispatcher.run(x, x, x.clone().requires_grad_())
    with torch.no_grad():
        assert dispatcher.run(x, x, x.clone().requires_grad_()).shape == (4, 4)


def test_any_dlpack_or_cuda_array_interface_array_is_taken_and_its_kind_returned(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = random(17, 32), random(32, 24), random(32, 24)

    class Interface:
        def __init__(self, array: Any) -> None:
            self.array = array
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    class Dlpack:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __array_namespace__(self) -> Any:
            class Namespace:
                from_dlpack = Dlpack

            return Namespace

    assert_right(dispatcher.run(Interface(a), Interface(b1), Interface(b2)), a, b1, b2)
    out = dispatcher.run(Dlpack(a), Dlpack(b1), Dlpack(b2))
    assert isinstance(out, Dlpack)
    assert_right(out.array, a, b1, b2)
    target = Interface(cupy.empty((17, 24), np.float16))
    assert dispatcher.run(Interface(a), Interface(b1), Interface(b2), out=target) is target
    assert_right(target.array, a, b1, b2)


def test_work_is_ordered_on_the_callers_stream_also_at_the_first_call(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin() { long long t = clock64(); while (clock64() - t < 40000000) {} }', "spin"
    )
    spin((1,), (1,), ())
    b1, b2, source = random(64, 48), random(64, 48), random(33, 64)
    for variant in (None, "split_cublas", "fused_mma", "split_simt", None):
        a = cupy.zeros((33, 64), np.float16)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            spin((1,), (1,), ())
            a[...] = source
            out = dispatcher.run(a, b1, b2, candidate=variant)
            stream.synchronize()
        assert_right(out, source, b1, b2)


def test_a_new_problem_is_refused_in_a_capture_and_a_known_one_is_captured(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = random(33, 64), random(64, 48), random(64, 48)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for variant in ("fused_mma", "split_mma", "split_cublas"):
            out = cupy.zeros((33, 48), np.float16)
            stream.begin_capture()
            with pytest.raises(LaunchError, match="outside CUDA graph capture"):
                dispatcher.run(a, b1, b2, out=out, candidate=variant)
            stream.end_capture()  # the capture is still valid
            dispatcher.run(a, b1, b2, out=out, candidate=variant)
            stream.synchronize()
            out.fill(0)
            stream.begin_capture()
            dispatcher.run(a, b1, b2, out=out, candidate=variant)
            graph = stream.end_capture()
            # memory that the graph uses must not be handed out to these
            others = [cupy.full(size, 7, np.uint8) for size in (512, 33 * 48 * 8, 1 << 20, 33 << 20)]
            graph.launch(stream)
            assert all(bool((x == 7).all()) for x in others)
            stream.synchronize()
            assert_right(out, a, b1, b2)


def test_arrays_on_another_device_run_there_and_the_current_device_is_kept(
    cupy: Any, dispatcher: Dispatcher, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    a, b1, b2 = random(33, 64), random(64, 48), random(64, 48)
    with cupy.cuda.Device(1):
        there = [cupy.asarray(x) for x in (a, b1, b2)]
    for variant in (None, "fused_mma", "split_cublas", "split_simt"):
        out = dispatcher.run(*there, candidate=variant)
        assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
        with cupy.cuda.Device(1):
            assert_right(out, *there)
        assert_right(dispatcher.run(a, b1, b2, candidate=variant), a, b1, b2)
    with pytest.raises(ValueError, match="b1 must be on the device of a, cuda:0"):
        dispatcher.run(a, there[1], b2)
    with pytest.raises(ValueError, match="b1 must have as many rows"):
        dispatcher.run(there[0], there[1][:3], there[2])
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.parametrize("axis", ["m", "n"])
def test_more_tile_rows_or_columns_than_a_grid_axis_holds(
    cupy: Any, dispatcher: Dispatcher, serving: Callable[..., list[str]], axis: str
) -> None:
    long = 65535 * 16 + 1
    m, n = (long, 1) if axis == "m" else (1, long)
    a, b1, b2 = cupy.ones((m, 1), np.float16), cupy.ones((1, n), np.float16), cupy.full((1, n), 2, np.float16)
    for variant in (None, *serving(a, b1, b2)):
        out = dispatcher.run(a, b1, b2, candidate=variant)
        assert bool((abs(out - np.float16(1.4621172)) < 2e-3).all()), variant


@pytest.mark.parametrize("variant", [None, *(n for n, v in VARIANTS.items() if v.kind == "cuda")])
def test_results_past_two_to_the_31_elements(
    cupy: Any, dispatcher: Dispatcher, array: Callable[..., Any], variant: str | None
) -> None:
    m, k, n = 65537, 8, 32768
    if variant is not None and VARIANTS[variant].unmet(Problem(m, n, k, "float16"), cuda_device(0)):
        pytest.skip("not a variant for this device")
    rng = np.random.default_rng(0)
    a = array(rng.normal(0, 1, (m, k)), "float16")
    b1, b2 = (array(rng.normal(0, 0.5, (k, n)), "float16") for _ in range(2))
    out = dispatcher.run(a, b1, b2, candidate=variant)
    for rows in (slice(0, 4), slice(2**31 // n - 4, 2**31 // n + 1), slice(m - 4, m), slice(m // 2, m // 2 + 4)):
        gate, up = decode(a[rows]) @ decode(b1), decode(a[rows]) @ decode(b2)
        expected = gate / (1 + cupy.exp(-gate)) * up
        assert float(abs(decode(out[rows]) - expected).max()) < 0.02
    del out
    cupy.get_default_memory_pool().free_all_blocks()


def test_an_operand_past_two_to_the_31_elements(
    cupy: Any, dispatcher: Dispatcher, serving: Callable[..., list[str]]
) -> None:
    m, k = 2**21 + 3, 1032
    a = cupy.zeros((m, k), np.float16)
    a[-1] = 1
    b1, b2 = cupy.full((k, 1), 1 / 1024, np.float16), cupy.full((k, 1), 1 / 512, np.float16)
    gate, up = k / 1024, k / 512
    expected = gate / (1 + np.exp(-gate)) * up
    for variant in serving(a, b1, b2):
        out = dispatcher.run(a, b1, b2, candidate=variant)
        assert float(abs(out[:-1]).max()) == 0.0, variant
        assert float(out[-1, 0]) == pytest.approx(expected, rel=1e-3), variant
    del a
    cupy.get_default_memory_pool().free_all_blocks()


def test_a_call_without_memory_for_scratch_space_is_served_by_a_fused_candidate(
    cupy: Any, settings: Settings, random: Callable[..., Any], assert_right: Callable[..., None]
) -> None:
    a, b1, b2 = random(512, 2048), random(2048, 512), random(2048, 512)
    out = cupy.empty((512, 512), np.float16)
    registry = Registry({n: VARIANTS[n] for n in ("split_mma", "fused_simt")})
    dispatcher = Dispatcher(settings, registry=registry)
    assert dispatcher.explain(a, b1, b2, out=out).selection.candidate.variant.name == "split_mma"
    dispatcher.run(a, b1, b2, out=out)
    out.fill(np.nan)
    gc.collect()  # or the pool would do so when it runs out, and find what earlier tests left
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + 1024)
    hoard = []
    with contextlib.suppress(MemoryError):  # what is left free in blocks that are partly used
        while True:
            hoard.append(cupy.cuda.alloc(1 << 18))
    try:
        dispatcher.run(a, b1, b2, out=out)
        with pytest.raises(MemoryError):
            dispatcher.run(a, b1, b2, out=out, candidate="split_mma")
    finally:
        pool.set_limit(size=0)
    assert_right(out, a, b1, b2)
