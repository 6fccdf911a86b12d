"""Databases of every released schema are read as they are, and brought up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlite_utils import Database

from autodispatch import exchange
from autodispatch.benchmark import CpuWorkbench
from autodispatch.device import cpu_device
from autodispatch.migrations import APPLICATION_ID, SCHEMA_VERSION, STEPS, migrations
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord
from autodispatch.runner import LocalRunner
from autodispatch.store import TuningStore
from autodispatch.tuner import Tuner

CPU = cpu_device()
PROBLEM = Problem(4, 16, 8, "float32")


@pytest.fixture(params=range(1, SCHEMA_VERSION))
def older_schema(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, DecisionRecord]:
    """A database as an older version wrote it, and the decision in it."""
    new = TuningStore()
    decision = Tuner(new, LocalRunner(CpuWorkbench(CPU))).tune(PROBLEM)
    path = tmp_path / "old.db"
    old = Database(path)
    migrations.apply(old, stop_before=STEPS[request.param])
    old.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    old.execute(f"PRAGMA user_version = {request.param}")
    columns = {t: [c.name for c in old[t].columns] for t in ("devices", "environments", "sessions", "measurements")}
    for table, names in columns.items():
        rows = new._run(lambda db, t=table, n=names: list(db.query(f"SELECT {', '.join(n)} FROM {t}")))
        old[table].insert_all(rows)  # type: ignore[union-attr]
    names = [c.name for c in old["decisions"].columns]
    old["decisions"].insert_all(new._run(lambda db: list(db.query(f"SELECT {', '.join(names)} FROM decisions"))))  # type: ignore[union-attr]
    old.conn.commit()
    old.close()
    new.close()
    return path, decision if request.param > 1 else decision.model_copy(update={"ties": [], "complete": True})


def test_an_older_database_is_read_where_it_must_not_be_written(older_schema: tuple[Path, DecisionRecord]) -> None:
    path, decision = older_schema
    before = path.read_bytes()
    assert TuningStore(path, read_only=True).decision(CPU.key, PROBLEM) == decision
    assert path.read_bytes() == before


def test_an_older_database_is_brought_up_to_date_where_it_is_the_users_own(
    older_schema: tuple[Path, DecisionRecord],
) -> None:
    path, decision = older_schema
    store = TuningStore(path)
    assert store.decision(CPU.key, PROBLEM) == decision
    again = Tuner(store, LocalRunner(CpuWorkbench(CPU))).tune(PROBLEM)
    assert again.ties
    store.close()
    assert Database(path).execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION


def test_an_older_database_is_imported(older_schema: tuple[Path, DecisionRecord], tmp_path: Path) -> None:
    path, decision = older_schema
    store = TuningStore(tmp_path / "mine.db")
    outcome = exchange.import_file(store, path)
    assert not outcome.rejected
    assert store.decision(CPU.key, PROBLEM) == decision
