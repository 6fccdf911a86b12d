"""The short way of repeated calls, on NumPy arrays in the place of a GPU's, with a driver of the test's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autodispatch import driver, quick
from autodispatch.arrays import NumpyFamily
from autodispatch.device import cpu_device
from autodispatch.dispatcher import Dispatcher
from autodispatch.errors import CompileError
from autodispatch.problem import Problem
from autodispatch.quick import Quick
from autodispatch.settings import Settings
from autodispatch.variants.cpu import _CpuExecutable

RNG = np.random.default_rng(0)
SHAPES = ((24, 32), (32, 40), (32, 40))


class FakeDriver:
    """Packed launches by number: each does what its executable does, unless the driver refuses."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}
        self.launched: list[int] = []
        self.status = 0
        self._numbers = count(1)

    def pack(self, executable: _CpuExecutable, call: Any) -> SimpleNamespace:
        number = next(self._numbers)
        self.calls[number] = lambda: executable(call)
        return SimpleNamespace(addresses=(number, 0, 0))

    def launch(self, configuration: int, function: int, parameters: int, extra: None) -> int:
        if self.status == 0:
            self.launched.append(configuration)
            self.calls[configuration]()
        return self.status


def key(a: Any, b1: Any, b2: Any, out: Any, *options: Any) -> Any:
    arrays = (a, b1, b2) if out is None else (a, b1, b2, out)
    return (*((x.ctypes.data, x.shape, x.strides) for x in arrays), options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    found = FakeDriver()
    monkeypatch.setattr(NumpyFamily, "has_quick_calls", True)
    monkeypatch.setattr(_CpuExecutable, "pack", lambda self, call: found.pack(self, call), raising=False)
    monkeypatch.setattr(driver, "launch_kernel", lambda: found.launch)
    monkeypatch.setattr(quick, "launch_kernel", lambda: found.launch)
    way = Quick(key, lambda a, shape: np.empty(shape, a.dtype))
    monkeypatch.setattr(quick, "_quick_for", lambda family, kind: way)
    return found


@pytest.fixture
def d(tmp_path: Path) -> Iterator[Dispatcher]:
    found = Dispatcher(Settings(tmp_path / "t.db", reload_s=0))
    yield found
    found.close()


def arguments() -> tuple[Any, Any, Any]:
    a, b1, b2 = (RNG.standard_normal(s).astype(np.float32) for s in SHAPES)
    return a, b1, b2


def assert_right(out: Any, a: Any, b1: Any, b2: Any) -> None:
    gate, up = (a.astype(np.float64) @ b.astype(np.float64) for b in (b1, b2))
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


def test_a_repeated_call_is_the_same_launch(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    out = np.empty((24, 40), np.float32)
    for scale in (1.0, 2.0, 0.5):
        a *= np.float32(scale)
        assert d.run(a, b1, b2, out=out) is out
        assert_right(out, a, b1, b2)
    assert fake.launched == [1, 1, 1]
    assert d.counters().calls == {"heuristic": 3}


def test_without_out_each_call_has_memory_of_its_own(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    results = [d.run(a, b1, b2) for _ in range(4)]
    assert len({r.ctypes.data for r in results}) == 4
    for result in results:
        assert_right(result, a, b1, b2)


def test_a_launch_that_the_driver_refuses_goes_the_long_way(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    out = np.empty((24, 40), np.float32)
    d.run(a, b1, b2, out=out)
    fake.status = 201
    out.fill(np.nan)
    assert_right(d.run(a, b1, b2, out=out), a, b1, b2)
    assert fake.launched == [1]


def test_another_dtype_at_the_same_address_is_seen(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    out = np.empty((24, 40), np.float32)
    d.run(a, b1, b2, out=out)
    with pytest.raises(TypeError, match="b1 must have a dtype out of"):
        d.run(a, b1.view(np.int32), b2, out=out)
    with pytest.raises(TypeError, match="out must have a dtype out of"):
        d.run(a, b1, b2, out=out.view(np.int32))
    assert fake.launched == [1]


def test_copies_are_made_at_every_call(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    out = np.empty((24, 40), np.float32)
    for scale in (1.0, 3.0):
        a *= np.float32(scale)
        assert_right(d.run(a[::-1], b1, b2, out=out), a[::-1], b1, b2)
    assert fake.launched == [] and d.counters().copies == 2


def test_a_reload_forgets_the_launches_of_what_it_exchanged(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    out = np.empty((24, 40), np.float32)
    d.run(a, b1, b2, out=out)
    ready = d.planner.find(Problem(24, 40, 32, "float32"), cpu_device(), None, None)
    assert ready is not None and len(d._quick.launches) == 1
    defaults = d._registry.defaults(ready.selection.problem, cpu_device())
    other = next(c for c in defaults if c != ready.selection.candidate)
    whole = d._launch

    def exchanged_meanwhile(*matrices: Any) -> Any:
        result = whole(*matrices)
        ready.executable = other.executable(ready.selection.problem, cpu_device())
        return result

    d._launch = exchanged_meanwhile  # type: ignore[method-assign]
    d.run(a.copy(), b1, b2, out=out)
    assert d._quick.launches == {}


def test_a_call_that_another_candidate_helped_out_with_is_not_kept(
    fake: FakeDriver, d: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b1, b2 = arguments()
    monkeypatch.setattr(_CpuExecutable, "workspace_bytes", 64)
    monkeypatch.setattr(NumpyFamily, "workspace", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
    assert_right(d.run(a, b1, b2), a, b1, b2)
    assert d._quick.launches == {} and fake.launched == []
    assert d.counters().fallbacks == 1


def test_so_many_launches_are_kept_and_no_more(
    fake: FakeDriver, d: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "MAX_LAUNCHES", 5)
    a, b1, b2 = arguments()
    for _ in range(12):
        d.run(a.copy(), b1, b2)
        assert 0 < len(d._quick.launches) <= 5


def test_shapes_that_another_thread_forgets_meanwhile_are_no_error(fake: FakeDriver, d: Dispatcher) -> None:
    a, b1, b2 = arguments()
    d.run(a, b1, b2)

    class Forgetful(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    d._quick.shapes = Forgetful(d._quick.shapes)
    for _ in range(2):
        assert_right(d.run(a, b1, b2), a, b1, b2)


def test_arrays_are_not_kept_also_where_a_candidate_did_not_build(
    fake: FakeDriver, d: Dispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = d.explain(*arguments()).selection.candidate
    whole = type(first.variant).executable

    def failing(self: Any, config: Any, *rest: Any) -> Any:
        if config == first.config:
            raise CompileError("as the test says")
        return whole(self, config, *rest)

    monkeypatch.setattr(type(first.variant), "executable", failing)
    gc.disable()  # nothing is left for it to do
    try:
        arrays = list(arguments())
        for _ in range(3):
            d.run(*arrays)
        gone = [weakref.ref(x) for x in arrays]
        fake.calls.clear()  # the test's own driver keeps what it launches
        del arrays
        assert [w() is None for w in gone] == [True] * 3
    finally:
        gc.enable()
    assert "is passed over" in caplog.text
