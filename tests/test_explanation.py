"""What an explanation says of a record that serves though it was made elsewhere or otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autodispatch import explanation as module
from autodispatch import heuristics
from autodispatch.device import DeviceInfo
from autodispatch.explanation import Use, explain
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.runner import LocalRunner
from autodispatch.selection import Origin
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import VARIANTS, Candidate, Registry
from tests.fakes import A100, H200, FakeConfig, FakeVariant, FakeWorkbench, like, registry_of
from tests.stored import decided

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


def test_an_explanation_tells_how_both_paths_use_the_device(explained: Any) -> None:
    found = explained()
    assert found.distance == 0.0
    assert found.expected_regret == 0.0
    pick, other = found.uses
    assert (pick.path, other.path) == (found.selection.candidate.variant.path, "split")
    assert pick.time_us == pytest.approx(found.selection.median_us)
    assert other.nbytes - pick.nbytes == 16 * PROBLEM.m * PROBLEM.n  # c1 and c2 in fp32, out and back
    assert pick.memory == pytest.approx(pick.nbytes / (pick.time_us * 1e-6) / H200.bandwidth)
    assert found.ties and found.runner_up is found.alternatives[0]
    text = str(found)
    assert "runner-up: " in text and "blocks per SM in" in text and "the split path is bound by " in text
    assert "doublings" not in text


def use(path: str, time_us: float, launches: int, waves: float, nbytes: int) -> Use:
    candidate = Candidate(FakeVariant(f"{path} fake", path), FakeConfig(10))
    return Use(candidate, path, time_us, launches, 1.0, waves, nbytes, 0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            use("split", 20.0, 2, 0.9, 250),
            "2.00 times as long: it moves 2.50 times the bytes, takes 2 launches",
        ),
        (use("split", 15.0, 1, 1.2, 100), "it leaves 40% of its waves' places empty (the pick 10%)"),
        (use("split", 11.0, 1, 0.9, 100), "only more slowly"),
        (use("split", 9.0, 2, 1.2, 250), ""),
    ],
)
def test_what_the_other_path_lost_by_is_told(explained: Any, other: Use, why: str) -> None:
    found = replace(explained(), uses=(use("fused", 10.0, 1, 0.9, 100), other))
    assert why in found.why and bool(found.why) == bool(why)
    assert not why or found.why in str(found)


@pytest.mark.parametrize(("intermediate", "nbytes"), [("float32", 16), ("bfloat16", 8)])
def test_what_crosses_memory_is_counted_as_it_is_stored(intermediate: str, nbytes: int) -> None:
    problem = Problem(4096, 8960, 1536, "bfloat16", math="fast")
    variant = VARIANTS["split_mma"]
    config = next(c for c in variant.space.legal(problem, A100) if (c.intermediate, c.split_k) == (intermediate, 1))
    found = explain(problem, A100, Registry(), None, Candidate(variant, config))
    assert found.uses[0].crossing == nbytes * problem.m * problem.n
    assert f"fusing saves {nbytes * problem.m * problem.n / 1e6:.1f} of its" in found.verdict
    assert found.uses[0].waves > 0


def test_where_nothing_was_measured_the_model_speaks_for_both_paths(explained: Any, store: TuningStore) -> None:
    registry = Registry(registry_of(CudaFake("any"), CudaFake("library", "split", (20,), is_library=True)))
    found = explain(replace(PROBLEM, m=4096), H200, registry, Layers([("user", store)]))
    assert found.selection.origin is Origin.HEURISTIC
    assert {u.path for u in found.uses} == {"fused", "split"}
    assert found.uses[0].candidate == found.selection.candidate
    assert found.distance is None and found.expected_regret is None


def test_a_pick_that_the_model_moved_is_compared_by_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "environment", lambda device: VERSIONS)
    layers = decided(Problem(512, 8960, 1536, "bfloat16", "nk"), "fused_wgmma", tile_m=128, tile_n=96, cooperative=0)
    problem = Problem(384, 8960, 1536, "bfloat16", "nk")
    found = explain(problem, H200, Registry(), layers)
    assert found.selection.origin is Origin.BUCKET and found.selection.median_us is None and found.gain is None
    assert {u.path for u in found.uses} == {"fused", "split"}
    for u in found.uses:
        assert u.time_us == heuristics.predict(u.candidate, problem, H200).total * 1e6
    assert "runner-up: fused_wgmma, 41.0 us at m = 512" in str(found)


def test_the_expected_regret_comes_from_the_other_m_that_were_tuned(
    store: TuningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("autodispatch.tuner", "autodispatch.explanation"):
        monkeypatch.setattr(f"{where}.environment", lambda device: VERSIONS)
    registry = Registry(registry_of(CudaFake("any"), CudaFake("library", "split", (20,), is_library=True)))
    tuner = Tuner(store, LocalRunner(FakeWorkbench(H200)), registry)
    for m in (32, 64, 128):
        tuner.tune(replace(PROBLEM, m=m))
    found = explain(replace(PROBLEM, m=100), H200, registry, Layers([("user", store)]))
    assert found.selection.origin is Origin.BUCKET and found.distance == pytest.approx(0.356, abs=1e-3)
    assert found.expected_regret is not None and 0 <= found.expected_regret < 1
    assert "expected regret" in str(found) and "0.36 doublings of m away" in str(found)
