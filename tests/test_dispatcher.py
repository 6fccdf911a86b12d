"""Dispatcher and run() end to end on the CPU device: right results, modes, explanations, and what a call may not do."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autodispatch import dispatcher as module
from autodispatch import planning
from autodispatch.arrays import CupyFamily, NumpyFamily, Stream
from autodispatch.benchmark import CpuWorkbench
from autodispatch.device import cpu_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import AutodispatchError, LaunchError, StoreError, UnsupportedProblemError
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Candidate, Executable, Registry
from autodispatch.variants.cpu import CpuSplit
from tests.fakes import FakeVariant, registry_of

CPU = cpu_device()
RNG = np.random.default_rng(0)


def arguments(m: int = 24, n: int = 40, k: int = 32) -> tuple[Any, Any, Any]:
    return tuple(RNG.standard_normal(s).astype(np.float32) for s in ((m, k), (k, n), (k, n)))


def truth(a: Any, b1: Any, b2: Any) -> Any:
    gate, up = (a.astype(np.float64) @ b.astype(np.float64) for b in (b1, b2))
    return gate / (1 + np.exp(-gate)) * up


def assert_right(out: Any, a: Any, b1: Any, b2: Any) -> None:
    np.testing.assert_allclose(out, truth(a, b1, b2), rtol=1e-4, atol=1e-4)


def tune(d: Dispatcher, problem: Problem) -> None:
    Tuner(d.layers.user, LocalRunner(CpuWorkbench(CPU))).tune(problem)


def test_a_tuned_problem_is_found_by_another_dispatcher(settings: Settings) -> None:
    a, b1, b2 = arguments()
    first = Dispatcher(settings)
    assert first.explain(a, b1, b2).selection.origin is Origin.HEURISTIC
    assert_right(first.run(a, b1, b2), a, b1, b2)
    tune(first, first.explain(a, b1, b2).selection.problem)
    first.close()
    second = Dispatcher(settings)
    explanation = second.explain(a, b1, b2)
    assert explanation.selection.origin is Origin.TUNED
    assert explanation.selection.layer == "user"
    assert explanation.gain is not None
    assert explanation.gain > 0
    assert explanation.other_path is not None
    assert "tuned: measured" in str(explanation)
    assert_right(second.run(a, b1, b2), a, b1, b2)
    second.close()


@pytest.mark.parametrize("name", ["cpu_split", "cpu_fused"])
def test_both_paths_are_right_on_blocks_that_do_not_divide_the_shape(dispatcher: Dispatcher, name: str) -> None:
    a, b1, b2 = arguments(300, 700, 50)
    assert_right(dispatcher.run(a, b1, b2, candidate=name), a, b1, b2)


def test_views_and_out_are_handled_as_on_a_gpu(dispatcher: Dispatcher) -> None:
    a, b1, b2 = arguments(24, 40, 32)
    wide = np.full((26, 64), np.nan, np.float32)
    out = wide[1:25, 8:48]
    for x, y, z in ((a[::-1], b1, b2), (np.asfortranarray(a), b1, b2), (a, b1[:, ::-1], b2), (a, b1.copy("F"), b2)):
        assert dispatcher.run(x, y, z, out=out) is out
        assert_right(out, x, y, z)
    assert np.isnan(wide).sum() == wide.size - out.size
    transposed = np.empty((40, 24), np.float32).T
    assert_right(dispatcher.run(a, b1, b2, out=transposed), a, b1, b2)
    with pytest.raises(ValueError, match="out must not overlap a"):
        dispatcher.run(a, b1[:, :32], b2[:, :32], out=a)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (4, 0, 4), (0, 0, 0), (3, 5, 0)])
def test_empty_problems_need_no_candidate_and_leave_no_record(dispatcher: Dispatcher, m: int, n: int, k: int) -> None:
    out = dispatcher.run(np.ones((m, k), np.float32), np.ones((k, n), np.float32), np.ones((k, n), np.float32))
    assert out.shape == (m, n)
    assert not out.any()
    given = np.full((m, n), np.nan, np.float32)
    zeros = np.zeros((k, n), np.float32)
    assert dispatcher.run(np.ones((m, k), np.float32), zeros, zeros, out=given) is given
    assert not given.any()
    assert sum(dispatcher.layers.user.counts().values()) == 0


def test_the_second_call_of_a_problem_looks_nothing_up(dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b1, b2 = arguments()
    dispatcher.run(a, b1, b2)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the hot path must not come here")

    monkeypatch.setattr(planning, "selections", never)
    monkeypatch.setattr(module, "describe", never)
    monkeypatch.setattr(TuningStore, "_run", never)
    assert_right(dispatcher.run(a, b1, b2), a, b1, b2)
    with pytest.raises(AssertionError, match="hot path"):
        dispatcher.run(a[:5], b1, b2)


def test_a_misaligned_view_is_another_problem_than_an_aligned_one(dispatcher: Dispatcher) -> None:
    buffer = np.zeros(16 * 32 + 4, np.float32)
    start = -buffer.ctypes.data % 16 // 4
    b = np.ones((32, 32), np.float32)
    problems = [
        dispatcher.explain(buffer[start + i : start + i + 512].reshape(16, 32), b, b).selection.problem
        for i in (0, 1, 2)
    ]
    assert [p.alignment for p in problems] == [16, 4, 8]


# modes


def test_cache_mode_never_tunes_and_warns_once_per_class_with_the_command_to_run(
    dispatcher: Dispatcher, warnings_logged: pytest.LogCaptureFixture
) -> None:
    for m in (3, 300, 900):
        dispatcher.run(*arguments(m))
    assert dispatcher.layers.user.counts()["measurements"] == 0
    assert [r.getMessage().split("; ")[1] for r in warnings_logged.records] == [
        "to tune it: autodispatch tune 3,40,32 --dtype float32 --layout kn"
    ]


def test_tune_mode_tunes_at_the_first_miss_only(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"))
    a, b1, b2 = arguments()
    assert_right(d.run(a, b1, b2), a, b1, b2)
    counts = d.layers.user.counts()
    assert counts["decisions"] == 1
    d.run(a, b1, b2)
    Dispatcher(Settings(tmp_path / "t.db", mode="tune")).run(a, b1, b2)
    assert d.layers.user.counts() == counts


def test_force_mode_tunes_again_once_per_process(tmp_path: Path) -> None:
    a, b1, b2 = arguments()
    for expected in (1, 2):
        d = Dispatcher(Settings(tmp_path / "t.db", mode="force"))
        d.run(a, b1, b2)
        d.run(a, b1, b2)
        assert d.layers.user.counts()["sessions"] == expected
        assert d.layers.user.counts()["decisions"] == 1


def test_off_mode_opens_no_store(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="off"))
    a, b1, b2 = arguments()
    assert_right(d.run(a, b1, b2), a, b1, b2)
    assert d.explain(a, b1, b2).selection.origin is Origin.HEURISTIC
    assert list(tmp_path.iterdir()) == []


def test_misses_are_recorded_where_the_user_asked_for_it(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", record_misses=True))
    for _ in range(3):
        d.run(*arguments())
    (miss,) = d.layers.user.misses()
    assert (miss["m"], miss["n"], miss["k"], miss["count"]) == (24, 40, 32, 1)


def test_a_tuning_that_fails_inside_a_call_does_not_fail_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AutodispatchError("no candidate was right")

    monkeypatch.setattr(Tuner, "tune", fail)
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"))
    a, b1, b2 = arguments()
    assert_right(d.run(a, b1, b2), a, b1, b2)
    assert "could not be tuned: no candidate was right" in warnings_logged.text


# what may be broken without breaking a call


def test_a_broken_store_does_not_break_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.db"
    path.write_bytes(b"not a database " * 600)
    d = Dispatcher(Settings(path, (tmp_path / "absent.db",), record_misses=True))

    def locked(*_: object) -> None:
        raise StoreError("database is locked")

    monkeypatch.setattr(TuningStore, "record_miss", locked)
    a, b1, b2 = arguments()
    assert_right(d.run(a, b1, b2), a, b1, b2)
    assert "is corrupt" in warnings_logged.text
    assert "database is locked" in warnings_logged.text


def test_a_candidate_that_does_not_build_is_passed_over_with_a_warning(
    settings: Settings, warnings_logged: pytest.LogCaptureFixture
) -> None:
    broken = FakeVariant("broken", speeds=(0,), build_error="an #error")
    registry = Registry({**registry_of(broken), "cpu_split": VARIANTS["cpu_split"]})
    d = Dispatcher(settings, registry=registry)
    a, b1, b2 = arguments()
    assert_right(d.run(a, b1, b2), a, b1, b2)
    assert "broken(speed=0) is passed over: an #error" in warnings_logged.text
    only = Dispatcher(settings, registry=Registry(registry_of(broken)))
    with pytest.raises(UnsupportedProblemError, match="some candidate must build"):
        only.run(a, b1, b2)


def test_options_are_checked_and_named(dispatcher: Dispatcher) -> None:
    a, b1, b2 = arguments()
    for option, value in (("activation", "tanh"), ("math", "sloppy"), ("precision", "fp8"), ("candidate", "nobody")):
        with pytest.raises(ValueError, match=f"{option} must be"):
            dispatcher.run(a, b1, b2, **{option: value})
    with pytest.raises(UnsupportedProblemError, match="fused_mma requires runs on cuda devices"):
        dispatcher.run(a, b1, b2, candidate="fused_mma")


def assert_right_in_threads(dispatcher: Dispatcher, cases: list[Any]) -> None:
    """Runs the cases in eight threads that begin at once, and checks the results."""
    results: list[Any] = [None] * len(cases)
    barrier = threading.Barrier(8)

    def work(worker: int) -> None:
        barrier.wait()
        for i in range(worker, len(cases), 8):
            results[i] = dispatcher.run(*cases[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, result in zip(cases, results, strict=True):
        assert_right(result, *case)


def test_threads_share_a_dispatcher(dispatcher: Dispatcher) -> None:
    cases = [arguments(8 + i % 4) for i in range(16)]
    assert_right_in_threads(dispatcher, cases)


def test_threads_that_meet_a_new_problem_tune_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Problem] = []
    timing = threading.Lock()

    def tune(self: Tuner, problem: Problem, **options: Any) -> Any:
        assert timing.acquire(blocking=False)  # never two at once on one device
        tuned.append(problem)
        time.sleep(0.05)
        timing.release()
        raise AutodispatchError("as the test says")

    monkeypatch.setattr(Tuner, "tune", tune)
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"))
    for cases in ([arguments(8)] * 8, [arguments(16 + i) for i in range(8)]):
        assert_right_in_threads(d, cases)
    assert len(tuned) == len(set(tuned)) == 9


def test_a_candidate_that_calls_run_itself_is_tuned_without_a_deadlock(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"), registry=Registry({}))

    class Nested(CpuSplit):
        name = "nested"

        def executable(self, *arguments: Any) -> Any:
            whole = super().executable(*arguments)

            class Calling(Executable):
                def __call__(self, call: Any) -> None:
                    inner = np.ones((2, 2), np.float32)
                    d.run(inner, inner, inner, candidate="cpu_split")
                    d.run(np.ones((3, 2), np.float32), inner, inner)
                    whole(call)

            return Calling() if arguments[1].n > 2 else whole

    d._registry = Registry({"nested": Nested(), "cpu_split": VARIANTS["cpu_split"]})
    a, b1, b2 = arguments()
    done = threading.Event()

    def work() -> None:
        assert_right(d.run(a, b1, b2, candidate=None), a, b1, b2)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(60)
    assert d.layers.user.counts()["decisions"] == 1
    d.close()


def test_the_module_level_functions_share_one_dispatcher(tmp_path: Path) -> None:
    a, b1, b2 = arguments()
    module.configure(Settings(tmp_path / "t.db"))
    assert_right(module.run(a, b1, b2), a, b1, b2)
    assert module.explain(a, b1, b2).selection.origin is Origin.HEURISTIC
    module.configure(Settings(tmp_path / "u.db"))
    assert "autodispatch" in sys.modules


def test_wrong_out_is_refused_before_a_tuning_begins(tmp_path: Path) -> None:
    d = Dispatcher(Settings(tmp_path / "t.db", mode="tune"))
    a, b1, b2 = arguments(24, 32, 32)
    with pytest.raises(ValueError, match="out must not overlap a"):
        d.run(a, b1, b2, out=a)
    assert not (tmp_path / "t.db").exists()


def test_explain_refuses_what_run_refuses(dispatcher: Dispatcher) -> None:
    a, b1, b2 = arguments(24, 32, 32)
    with pytest.raises(ValueError, match="out must not overlap a"):
        dispatcher.explain(a, b1, b2, out=a)
    illegal = Candidate(VARIANTS["fused_mma"], VARIANTS["fused_mma"].default(Problem(8, 8, 8, "float16"), CPU))
    for call in (dispatcher.explain, dispatcher.run):
        with pytest.raises(UnsupportedProblemError, match="runs on cuda devices"):
            call(a, b1, b2, candidate=illegal)


def test_masked_arrays_are_refused(dispatcher: Dispatcher) -> None:
    a, b1, b2 = arguments()
    with pytest.raises(TypeError, match=r"b1 must be a NumPy array like the other arguments \(got numpy.ma"):
        dispatcher.run(a, np.ma.masked_array(b1, b1 > 0), b2)


def test_there_is_nothing_to_explain_where_nothing_is_launched(dispatcher: Dispatcher) -> None:
    a, b1, b2 = arguments(0)
    with pytest.raises(UnsupportedProblemError, match="nothing is launched"):
        dispatcher.explain(a, b1, b2)


def test_a_library_that_cannot_be_loaded_is_passed_over(
    settings: Settings, warnings_logged: pytest.LogCaptureFixture
) -> None:
    class Unloadable(FakeVariant):
        def executable(self, *_: Any) -> Any:
            raise LaunchError("cuBLAS 12 or newer must be loadable")

    registry = Registry({**registry_of(Unloadable("library", speeds=(0,))), "cpu_split": VARIANTS["cpu_split"]})
    a, b1, b2 = arguments()
    assert_right(Dispatcher(settings, registry=registry).run(a, b1, b2), a, b1, b2)
    assert "must be loadable" in warnings_logged.text


def test_what_a_graph_capture_uses_is_kept_and_what_the_caller_gave_is_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Capturing(NumpyFamily, CupyFamily):
        def __init__(self) -> None:
            return

        def stream(self, device: int | None) -> Stream:
            return Stream(1)

    family, looks = Capturing(), iter([False, True])
    monkeypatch.setattr(module, "family_of", lambda _: family)
    monkeypatch.setattr(module, "is_capturing", lambda _: next(looks))
    d = Dispatcher(settings)
    a, b1, b2 = arguments()
    reverse, out = a[::-1], np.empty((24, 40), np.float32)
    assert_right(d.run(reverse, b1, b2, out=out), reverse, b1, b2)
    ((memory, copies),) = d._captured
    assert memory is None
    (copy,) = copies
    np.testing.assert_array_equal(copy, reverse)
    assert not np.shares_memory(copy, a)


def test_within_autotune_a_call_tunes_what_it_finds_untuned_and_only_then(settings: Settings) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((4, 8), (8, 16), (8, 16))]
    module.configure(settings)
    heard: list[Any] = []
    with module.autotune(listener=heard.append):
        module.run(*arrays)
        steps = len(heard)
        module.run(*arrays)
    assert steps == len(heard) > 0
    assert module.explain(*arrays).selection.origin is Origin.TUNED
    other = [a[:2] if a is arrays[0] else a for a in arrays]
    module.run(*other)
    assert len(heard) == steps
    assert module._default.settings == settings
