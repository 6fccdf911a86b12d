"""What an explanation says of a record that serves though it was made elsewhere or otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from autodispatch import explanation as module
from autodispatch.device import DeviceInfo
from autodispatch.explanation import explain
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import H200, FakeVariant, FakeWorkbench, like, registry_of

PROBLEM = Problem(64, 128, 256, "float16")
VERSIONS = {
    "python": "3.12.3",
    "numpy": "2.0.0",
    "autodispatch": "0.1.0",
    "platform": "Linux-x86_64",
    "driver": "13.0",
    "cuda_runtime": "13.0",
    "nvrtc": "13.0",
    "cupy": "14.2.0",
}


class CudaFake(FakeVariant):
    kind = "cuda"


@pytest.fixture
def explained(store: TuningStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The explanation on a device with some versions, of what was tuned on an H200 with VERSIONS."""
    registry = Registry(registry_of(CudaFake("any"), CudaFake("library", "split", (20,), is_library=True)))
    monkeypatch.setattr("autodispatch.tuner.environment", lambda device: VERSIONS)
    Tuner(store, LocalRunner(FakeWorkbench(H200)), registry).tune(PROBLEM)

    def call(device: DeviceInfo = H200, **versions: str) -> module.Explanation:
        monkeypatch.setattr(module, "environment", lambda device: {**VERSIONS, **versions})
        return explain(PROBLEM, device, registry, Layers([("user", store)]))

    return call


def test_a_record_of_this_machine_differs_in_nothing(explained: Any) -> None:
    found = explained()
    assert (found.selection.origin, found.differences) == (Origin.TUNED, ())
    assert "measured with" not in str(found)


@pytest.mark.parametrize("field", ["driver", "cuda_runtime", "nvrtc"])
def test_a_version_that_matters_is_named_and_the_record_serves(explained: Any, field: str) -> None:
    found = explained(**{field: "13.9"})
    assert found.selection.origin is Origin.TUNED
    assert found.differences == ((field.replace("_", " "), "13.0", "13.9"),)
    assert f"measured with {field.replace('_', ' ')} 13.0, here 13.9" in str(found)


def test_another_timing_protocol_is_named(explained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROTOCOL_VERSION", 99)
    assert [d.field for d in explained().differences] == ["timing protocol"]


@pytest.mark.parametrize("field", ["python", "numpy", "autodispatch", "platform", "cupy"])
def test_a_version_that_does_not_matter_is_not_named(explained: Any, field: str) -> None:
    assert explained(**{field: "other"}).differences == ()


@pytest.mark.parametrize(
    "change", [{"clock_khz": 1}, {"bandwidth": 1e12}, {"l2_bytes": 1 << 20}, {"uuid": "x"}, {"index": 3}]
)
def test_an_attribute_that_does_not_matter_is_not_named(explained: Any, change: dict[str, Any]) -> None:
    found = explained(like(H200, **change))
    assert (found.selection.origin, found.differences) == (Origin.TUNED, ())
