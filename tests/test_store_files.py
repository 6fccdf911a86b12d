"""Files that are not as they should be: nothing foreign is written to, and a broken file stops nobody."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autodispatch import database
from autodispatch.errors import StoreError
from autodispatch.layers import Layers
from autodispatch.migrations import APPLICATION_ID, SCHEMA_VERSION
from autodispatch.problem import Problem
from autodispatch.selection import Origin, select
from autodispatch.store import TuningStore
from autodispatch.variants import Registry
from tests.stored import CPU, PROBLEM, decision, filled, measurement


def checkpoint(store: TuningStore) -> None:
    """Brings all that was written into the file itself."""
    store._run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))


@pytest.mark.parametrize("damage", ["garbage", "cut", "page"])
def test_a_corrupt_file_is_moved_aside_and_begun_anew_with_one_warning(
    tmp_path: Path, warnings_logged: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    filled(store)
    for i in range(200):
        store.add_measurement(measurement(median=20.0 + i))
    checkpoint(store)
    store.close()
    content = path.read_bytes()
    broken = {
        "garbage": b"not a database " * 600,
        "cut": content[: len(content) // 2],
        "page": content[:100] + b"\xff" * 8000 + content[8100:],
    }[damage]
    path.write_bytes(broken)
    again = TuningStore(path)
    assert again.decision(CPU.key, PROBLEM) is None
    filled(again)
    assert again.decision(CPU.key, PROBLEM) is not None
    (aside,) = (p for p in tmp_path.iterdir() if ".corrupt-" in p.name and not p.name.endswith(("-wal", "-shm")))
    assert aside.read_bytes() == broken
    assert len(warnings_logged.records) == 1
    assert str(aside) in warnings_logged.records[0].getMessage()


@pytest.mark.parametrize("is_open", [True, False], ids=["while open", "before opening"])
def test_a_damaged_page_of_a_table_is_found_at_the_first_use(
    tmp_path: Path, warnings_logged: pytest.LogCaptureFixture, is_open: bool
) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    filled(store)
    store.record_miss(CPU.key, PROBLEM)
    checkpoint(store)
    (page, size) = store._run(
        lambda db: db.execute(
            "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_master WHERE name = 'misses'"
        ).fetchone()
    )
    store.close()
    content = bytearray(path.read_bytes())
    content[(page - 1) * size : page * size] = b"\xff" * size
    if is_open:
        store = TuningStore(path)
        path.write_bytes(content)
        store._db.conn.execute("PRAGMA shrink_memory")
    else:
        path.write_bytes(content)
        store = TuningStore(path)
    assert store.misses() == []
    store.record_miss(CPU.key, PROBLEM)
    assert len(store.misses()) == 1
    assert len(list(tmp_path.glob("*.corrupt-*"))) == 1
    assert len(warnings_logged.records) == 1


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    path.touch()
    filled(TuningStore(path))
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_a_database_of_another_program_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE measurements (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="must be a tuning database or a new file"):
        TuningStore(path)
    assert path.read_bytes() == before


def test_a_newer_schema_is_refused_with_both_versions_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    TuningStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"schema version {SCHEMA_VERSION} or older \(got {SCHEMA_VERSION + 1}\)"):
        TuningStore(path)
    assert path.read_bytes() == before


def test_an_older_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    with pytest.raises(StoreError, match="to be read without writing"):
        TuningStore(path, read_only=True)
    filled(TuningStore(path))
    assert TuningStore(path, read_only=True).decision(CPU.key, PROBLEM) is not None


def test_a_read_only_store_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    filled(TuningStore(path))
    store = TuningStore(path, read_only=True)
    with pytest.raises(StoreError, match="must be writable"):
        store.record_miss(CPU.key, PROBLEM)


@pytest.fixture
def no_side_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that cannot be written (root may write whatever the mode says)."""
    connect = sqlite3.connect

    class Refusing(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:
            raise sqlite3.OperationalError("unable to open database file")

    def connected(database: object, **options: Any) -> sqlite3.Connection:
        refuse = "mode=ro" in str(database) and "immutable" not in str(database)
        return connect(database, **options, **({"factory": Refusing} if refuse else {}))  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(sqlite3, "connect", connected)


@pytest.mark.usefixtures("no_side_files")
def test_a_database_in_a_folder_that_cannot_be_written_is_read_without_side_files(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    writer = TuningStore(path)
    made = filled(writer)
    assert writer.journal_mode == "wal"
    with pytest.raises(StoreError, match="unable to open"):  # what is in the log must not be passed over
        TuningStore(path, read_only=True)
    writer.close()
    before = sorted(p.name for p in tmp_path.iterdir())
    store = TuningStore(path, read_only=True)
    assert store.decision(CPU.key, PROBLEM) == made
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_database_that_others_write_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    writer = TuningStore(path)
    first = filled(writer)
    reader = TuningStore(path, read_only=True)
    assert reader.decision(CPU.key, PROBLEM) == first
    faster = measurement(median=1.0)
    writer.add_measurement(faster)
    writer.set_decision(decision(PROBLEM, faster))
    found = reader.decision(CPU.key, PROBLEM)
    assert found is not None and found.leader == faster.id


MOUNTS = """22 1 252:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / {home} rw,relatime shared:2 - {kind} server:/home rw
31 30 252:1 / {home}/scratch rw,relatime shared:3 - xfs /dev/vdb rw
"""


@pytest.mark.parametrize(
    ("kind", "mode"), [("nfs4", "truncate"), ("cifs", "truncate"), ("fuse.sshfs", "truncate"), ("xfs", "wal")]
)
def test_there_is_no_wal_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    mounts = tmp_path / "mountinfo"
    home = tmp_path / "home of a user"
    mounts.write_text(MOUNTS.format(home=str(home).replace(" ", "\\040"), kind=kind))
    monkeypatch.setattr(database, "_MOUNTS", mounts)
    assert TuningStore(home / "tuning.db").journal_mode == mode
    assert TuningStore(home / "scratch" / "tuning.db").journal_mode == "wal"


@pytest.mark.parametrize("error", ["locking protocol", "disk I/O error"])
def test_a_file_system_that_fails_leaves_calls_working_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings_logged: pytest.LogCaptureFixture, error: str
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError(error)

    monkeypatch.setattr(TuningStore, "_check_schema", fail)
    with pytest.raises(StoreError, match=error):
        TuningStore(tmp_path / "tuning.db")
    monkeypatch.undo()
    store = TuningStore(tmp_path / "tuning.db")
    filled(store)
    layers = Layers([("user", store)])
    monkeypatch.setattr(store, "_db", SimpleNamespace(query=fail, execute=fail))
    problem = Problem(8, 16, 32, "float32")
    assert select(problem, CPU, Registry(), layers).origin is Origin.HEURISTIC
    assert error in warnings_logged.text


def test_a_full_disk_is_an_error_and_loses_nothing_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    made = filled(store)
    store._run(lambda db: db.execute("PRAGMA max_page_count = 1"))  # as many as there are already
    more = [measurement(Problem(m, 16, 32, "float32"), samples_us=[1.5] * 900) for m in range(16, 80)]
    with pytest.raises(StoreError, match="full"):
        store.add_all(more)
    assert store.decision(CPU.key, PROBLEM) == made
    assert store.counts()["measurements"] == 1
    store._run(lambda db: db.execute("PRAGMA max_page_count = 100000"))
    assert store.add_all(more).new["measurements"] == len(more)
    assert not list(tmp_path.glob("*.corrupt-*"))


def test_layers_fall_back_to_memory_where_the_users_database_cannot_be_opened(
    tmp_path: Path, warnings_logged: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    layers = Layers.open(blocked / "tuning.db", [tmp_path / "absent.db"])
    filled(layers.user)
    assert [name for name, _ in layers] == ["memory"]
    assert len(warnings_logged.records) == 2
    assert "memory only" in warnings_logged.records[0].getMessage()


def test_a_corrupt_file_that_cannot_be_moved_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.db"
    path.write_bytes(b"not a database " * 600)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only folder")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match="corrupt and could not be replaced"):
        TuningStore(path)
    assert [name for name, _ in Layers.open(path)] == ["memory"]


def test_a_spoiled_row_is_left_out_with_a_warning(
    store: TuningStore, warnings_logged: pytest.LogCaptureFixture
) -> None:
    filled(store)
    other = Problem(16, 16, 32, "float32")
    filled(store, other)
    store.write(lambda db: db.execute("UPDATE decisions SET finalists = 'nope' WHERE m = 8"))
    assert store.decision(CPU.key, PROBLEM) is None
    assert [d.m for d in store.near_decisions(CPU.key, PROBLEM, 1, 99)] == [16]
    assert "is not a record and is left out" in warnings_logged.text
