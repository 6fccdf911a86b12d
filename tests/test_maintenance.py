"""Pruning, clearing and the doctor."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodispatch import cli, doctor, pruning, verification
from autodispatch.device import cpu_device
from autodispatch.errors import DeviceError
from autodispatch.layers import Layers
from autodispatch.problem import Problem
from autodispatch.pruning import Criteria
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner
from autodispatch.selection import selections
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner
from autodispatch.variants import Registry
from tests.fakes import FakeVariant, FakeWorkbench, registry_of

PROBLEM = Problem(64, 64, 64, "float32")
CPU = cpu_device()
REGISTRY = Registry(registry_of(FakeVariant("a"), FakeVariant("b", speeds=(20,)), FakeVariant("wrong", speeds=(5,))))


@pytest.fixture
def tuned(store: TuningStore) -> TuningStore:
    bench = FakeWorkbench(CPU, checks={"wrong": Check("wrong_result", "as the test says")})
    Tuner(store, LocalRunner(bench), REGISTRY).tune(PROBLEM)
    return store


def run(*words: str, expect: int = 0, answer: str | None = None) -> str:
    result = CliRunner().invoke(cli.app, list(words), input=answer)
    assert result.exit_code == expect, result.output
    return result.stdout if "--json" in words else result.output


def test_failures_are_dropped_alone_and_tried_again(tuned: TuningStore) -> None:
    before = tuned.counts()
    chosen = pruning.select(tuned, Criteria(has_failed=True), REGISTRY)
    assert {r.variant for r in chosen} == {"wrong"}
    assert pruning.drop(tuned, chosen)["measurements"] == 1
    assert tuned.counts() == {**before, "measurements": before["measurements"] - 1}
    assert tuned.decision(CPU.key, PROBLEM) is not None


def test_stale_records_go_with_the_decisions_that_they_lead(tuned: TuningStore) -> None:
    changed = Registry(registry_of(FakeVariant("a", digest="new"), FakeVariant("b", speeds=(20,))))
    chosen = pruning.select(tuned, Criteria(is_stale=True), changed)
    assert {r.variant for r in chosen} == {"a", "wrong"}
    gone = pruning.drop(tuned, chosen)
    assert gone["decisions"] == 1
    assert {r.variant for r in tuned.measurements()} == {"b"}
    assert tuned.decision(CPU.key, PROBLEM) is None


def test_criteria_are_met_together(tuned: TuningStore) -> None:
    later = datetime.now(timezone.utc) + timedelta(days=10)
    assert pruning.select(tuned, Criteria(older_than_days=5), REGISTRY) == []
    assert len(pruning.select(tuned, Criteria(older_than_days=5), REGISTRY, later)) == len(tuned.measurements())
    both = pruning.select(tuned, Criteria(older_than_days=5, has_failed=True), REGISTRY, later)
    assert [r.variant for r in both] == ["wrong"]
    assert pruning.select(tuned, Criteria(device_key="another"), REGISTRY) == []


def test_what_nothing_refers_to_goes_too(tuned: TuningStore) -> None:
    gone = pruning.drop(tuned, tuned.measurements())
    assert sum(tuned.counts().values()) == 0
    assert (gone["sessions"], gone["environments"], gone["devices"]) == (1, 1, 1)


def test_prune_and_clear_on_the_command_line(tmp_path: Path) -> None:
    run("prune", "--stale", expect=2)  # there is no database yet
    run("tune", "8,32,16", "--device", "cpu", "--quiet")
    run("prune", expect=2)
    assert "0 measurements would go" in run("prune", "--stale", "--dry-run")
    assert "dropped: nothing" in run("prune", "--older-than", "1")
    assert "dropped: 1 decisions" in run("prune", "--older-than", "0", "--device", CPU.key)
    run("tune", "8,32,16", "--device", "cpu", "--quiet")
    run("clear", answer="n", expect=1)
    assert TuningStore(tmp_path / "tuning.db").counts()["decisions"] == 1
    run("clear", answer="y")
    assert sum(TuningStore(tmp_path / "tuning.db").counts().values()) == 0


def statuses(settings: Settings) -> dict[str, doctor.Finding]:
    return {f.name: f for f in doctor.examine(settings)}


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DeviceError("CuPy must be importable")

    monkeypatch.setattr(doctor.devices, "import_cupy", missing)
    monkeypatch.setattr(doctor.devices, "cuda_count", lambda: 0)
    monkeypatch.setattr(doctor.devices, "cupy_packages", list)


@pytest.mark.usefixtures("without_cupy")
def test_a_sound_installation_has_no_errors(settings: Settings) -> None:
    found = statuses(settings)
    assert {"python", "kernels", "cupy", "your database"} <= found.keys()
    assert not [f for f in found.values() if f.status == "error"]
    assert not settings.database.exists()  # it looks and makes nothing


def test_a_damaged_database_and_one_of_a_newer_version_are_found(settings: Settings, tmp_path: Path) -> None:
    settings.database.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    found = statuses(settings)["your database"]
    assert found.status == "error"
    assert str(settings.database) in found.remedy
    other = tmp_path / "newer.db"
    TuningStore(other).close()
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA user_version = 99")
    newer = statuses(Settings(tmp_path / "none.db", read_only_databases=(other,)))[f"database {other}"]
    assert newer.status == "error"
    assert "99" in newer.detail


@pytest.mark.usefixtures("without_cupy")
def test_missing_and_doubled_packages_are_named_with_what_mends_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(settings)["cupy"].status == "warning"
    assert "cuda13" in statuses(settings)["cupy"].remedy
    monkeypatch.setattr(doctor.devices, "cupy_packages", lambda: ["cupy-cuda12x", "cupy-cuda13x"])
    assert statuses(settings)["cupy"].status == "error"
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in statuses(settings)["cupy"].remedy


def test_a_check_that_goes_wrong_is_a_finding(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(doctor.devices, "cupy_packages", broken)
    assert "unexpected" in statuses(settings)["cupy"].detail


@pytest.mark.usefixtures("without_cupy")
def test_doctor_exits_with_1_if_something_is_wrong(tmp_path: Path) -> None:
    assert "your database" in run("doctor")
    (tmp_path / "tuning.db").write_bytes(b"not a database, but long enough to be looked at" * 100)
    found = json.loads(run("doctor", "--json", expect=1))
    assert [f["status"] for f in found if f["name"] == "your database"] == ["error"]


class Elsewhere:
    """What another machine of the same model decided, in a read-only layer."""

    def __init__(self, **times: float) -> None:
        self.store = TuningStore()
        fakes = {name: (lambda t=t: t) for name, t in times.items()}
        runner = LocalRunner(FakeWorkbench(CPU, fakes))
        subject = Tuner(self.store, runner, REGISTRY)
        subject.tune(PROBLEM)
        self.layers = Layers([("user", TuningStore()), ("carried", self.store)])

    def verify_here(self, **times: float) -> verification.Verdict:
        fakes = {name: (lambda t=t: t) for name, t in times.items()}
        (foreign,) = verification.foreign_decisions(self.layers, CPU, REGISTRY, host="another")
        tuner = Tuner(self.layers.user, LocalRunner(FakeWorkbench(CPU, fakes)), REGISTRY)
        return verification.verify(tuner, self.layers.user, foreign, REGISTRY)


def test_what_holds_here_becomes_this_machines_own_decision() -> None:
    carried = Elsewhere(a=10.0, b=12.0, wrong=15.0)
    verdict = carried.verify_here(a=10.1, b=12.0, wrong=15.0)
    assert verdict.holds
    assert verdict.slowdown == pytest.approx(1.0)
    own = carried.layers.user.decision(CPU.key, PROBLEM)
    assert own is not None
    assert not own.complete  # a tuning would go on from here
    assert verification.foreign_decisions(carried.layers, CPU, REGISTRY) == []


def test_what_is_slower_here_is_replaced() -> None:
    carried = Elsewhere(a=10.0, b=12.0, wrong=15.0)
    verdict = carried.verify_here(a=15.0, b=12.0, wrong=18.0)
    assert not verdict.holds
    assert verdict.pick.variant.name == "b"
    assert verdict.slowdown == pytest.approx(15 / 12)
    choice = next(selections(PROBLEM, CPU, REGISTRY, carried.layers))
    assert (choice.layer, choice.candidate.variant.name) == ("user", "b")


def test_decisions_of_this_host_and_of_kernels_that_have_changed_are_not_verified() -> None:
    carried = Elsewhere(a=10.0, b=12.0, wrong=15.0)
    assert verification.foreign_decisions(carried.layers, CPU, REGISTRY) == []
    changed = Registry(registry_of(FakeVariant("a", digest="new"), FakeVariant("b", speeds=(20,))))
    assert verification.foreign_decisions(carried.layers, CPU, changed, host="another") == []


def test_a_sample_is_spread_over_all() -> None:
    every = [verification.Foreign(Problem(m, 8, 8, "float32"), "x", ()) for m in range(1, 101)]
    assert [f.problem.m for f in verification.sample(every, 4)] == [1, 26, 51, 76]
    assert verification.sample(every, 1000) == every
    assert verification.sample([], 5) == []


def test_verify_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tune", "8,32,16", "--device", "cpu", "--quiet")
    assert json.loads(run("verify", "--device", "cpu", "--json")) == []
    run("export", str(tmp_path / "x.jsonl"))
    monkeypatch.setenv("AUTODISPATCH_DB", str(tmp_path / "other.db"))
    run("import", str(tmp_path / "x.jsonl"))
    monkeypatch.setattr(verification.socket, "gethostname", lambda: "another")
    result = CliRunner().invoke(cli.app, ["verify", "--device", "cpu", "--no-isolate", "--json"])
    (row,) = json.loads(result.stdout)
    assert row["problem"].startswith("8,32,16")
    assert result.exit_code == (0 if row["holds"] else 1)
