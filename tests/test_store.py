"""The store: what is stored comes back, and what must not be stored does not get in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database

from autodispatch import resources
from autodispatch.errors import StoreError
from autodispatch.migrations import INITIAL, TIES, VIEWS
from autodispatch.problem import Problem
from autodispatch.records import (
    problem_fields,
)
from autodispatch.store import TuningStore
from tests.stored import CPU, PROBLEM, begin, decision, filled, measurement


def test_what_is_stored_comes_back_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "tuning.db"
    store = TuningStore(path)
    made = filled(store)
    store.close()
    again = TuningStore(path)
    assert again.decision(CPU.key, PROBLEM) == made
    assert again.measurement(made.leader) == measurement()
    assert again.decision(CPU.key, Problem(9, 16, 32, "float32")) is None
    assert again.decision("another-device", PROBLEM) is None


def test_the_same_measurement_is_stored_once(store: TuningStore) -> None:
    begin(store)
    assert store.add_measurement(measurement()) is True
    assert store.add_measurement(measurement()) is False
    assert store.add_measurement(measurement(median=11.0)) is True
    assert store.counts()["measurements"] == 2


def test_a_decision_is_replaced_and_found_for_any_m(store: TuningStore) -> None:
    filled(store)
    faster = measurement(median=9.0)
    store.add_measurement(faster)
    store.set_decision(decision(PROBLEM, faster))
    found = store.decision(CPU.key, PROBLEM)
    assert found is not None
    assert found.leader == faster.id
    near = store.near_decisions(CPU.key, Problem(999, 16, 32, "float32"), 1, 999)
    assert [d.m for d in near] == [8]
    assert store.near_decisions(CPU.key, Problem(9, 17, 32, "float32"), 1, 999) == []
    assert store.near_decisions(CPU.key, Problem(9, 16, 32, "float32"), 8.5, 999) == []
    assert store.near_decisions(CPU.key, PROBLEM, 1, 999) == []
    assert store.counts()["decisions"] == 1


def test_what_was_timed_in_another_regime_is_another_decision(store: TuningStore) -> None:
    cold = filled(store)
    record = measurement(median=2.0, regime="eager-warm")
    store.add_measurement(record)
    warm = decision(PROBLEM, record)
    store.set_decision(warm)
    assert store.decision(CPU.key, PROBLEM, "eager-cold") == cold
    assert store.decision(CPU.key, PROBLEM, "eager-warm") == warm
    assert store.counts()["decisions"] == 2


@pytest.mark.parametrize("field", ["dtype", "layout", "alignment", "precision", "math", "n", "k"])
def test_every_field_of_the_problem_must_match(store: TuningStore, field: str) -> None:
    filled(store)
    other = {"dtype": "float16", "layout": "nk", "alignment": 8, "precision": "tf32", "math": "fast", "n": 17, "k": 33}
    changed = Problem(**{**problem_fields(PROBLEM), field: other[field]})
    assert store.decision(CPU.key, changed) is None
    assert store.near_decisions(CPU.key, replace(changed, m=9), 1, 99) == []


def test_misses_are_counted(store: TuningStore) -> None:
    for _ in range(3):
        store.record_miss(CPU.key, PROBLEM)
    (miss,) = store.misses()
    assert (miss["count"], miss["m"]) == (3, 8)


def test_the_database_refuses_impossible_rows(store: TuningStore) -> None:
    begin(store)
    for change in ({"median_us": -1.0}, {"status": "ok", "median_us": None}):
        record = measurement().model_copy(update={"id": "x", **change})
        with pytest.raises(StoreError, match="CHECK"):
            store.write(lambda db, r=record: db["measurements"].insert({**r.model_dump(), "samples_us": "[]"}))
    assert store.counts()["measurements"] == 0


def test_the_views_show_winners_finals_and_failures(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "tuning.db")
    filled(store)
    loser = measurement(median=15.0, variant="cpu_fused", config='{"tile_m":64,"tile_n":128}')
    failure = measurement(median=None, status="wrong_result", reason="no", samples_us=[])  # type: ignore[arg-type]
    store.add_all([loser, failure])
    made = store.decision(CPU.key, PROBLEM)
    assert made is not None
    store.set_decision(made.model_copy(update={"finalists": [*made.finalists, loser.id]}))
    reader = Database(tmp_path / "tuning.db")  # as another program opens it
    views = {name: list(reader.query(f"SELECT * FROM {name}")) for name in reader.view_names()}
    (winner,) = views["winners"]
    assert (winner["m"], winner["variant"], winner["median_us"], winner["host"]) == (8, "cpu_split", 10.0, "h")
    assert winner["tflops"] == round(4 * 8 * 16 * 32 / 10e-6 / 1e12, 1)
    assert [(f["variant"], f["slowdown"], f["is_winner"]) for f in views["finals"]] == [
        ("cpu_split", 1.0, 1),
        ("cpu_fused", 1.5, 0),
    ]
    assert [(f["status"], f["reason"]) for f in views["failures"]] == [("wrong_result", "no")]


def test_the_description_for_datasette_fits_the_schema(tmp_path: Path) -> None:
    filled(TuningStore(tmp_path / "tuning.db"))
    reader = Database(tmp_path / "tuning.db")
    described = json.loads(resources.datasette().read_text())["databases"]["tuning"]

    for name, table in described["tables"].items():
        named = {*table.get("sortable_columns", ()), *table.get("facets", ()), *table.get("columns", ())}
        assert named <= {c[1] for c in reader.execute(f"PRAGMA table_info({name})").fetchall()}, name
    assert {*reader.table_names(), *reader.view_names()} == {*described["tables"]}
    for query in described["queries"].values():
        assert reader.execute(query["sql"]).description


def test_the_documented_schema_is_that_of_the_migrations() -> None:
    text = resources.schema().read_text()
    assert text.split("\n\n", 1)[1] == ";\n\n".join((*INITIAL, *TIES, *VIEWS)) + ";\n"
