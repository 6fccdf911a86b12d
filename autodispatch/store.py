"""TuningStore: what was measured and decided, in SQLite.

Every write is one short BEGIN IMMEDIATE transaction.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlite_utils import Database

from autodispatch.errors import StoreError
from autodispatch.locks import exclusive
from autodispatch.migrations import APPLICATION_ID, SCHEMA_VERSION, STEPS, migrations
from autodispatch.problem import Problem
from autodispatch.records import (
    PROBLEM_FIELDS,
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    ProblemRecord,
    Record,
    SessionRecord,
    now,
    problem_fields,
)

_log = logging.getLogger("autodispatch")
BUSY_TIMEOUT_S = 60.0
_JSON_COLUMNS = ("samples_us", "finalists", "ties")
_SAME_PROBLEM = tuple(f for f in PROBLEM_FIELDS if f != "m")

T = TypeVar("T")


class TuningStore:
    """One tuning database. `path` None keeps it in memory. Safe to share between threads.

    Opening creates the file and its folder, and brings an older schema up to date in one transaction. A corrupt file
    is moved aside to `<name>.corrupt-<time>`, with a warning, and a new one is begun.

    Raises StoreError for a file of another program, of a newer schema, or that cannot be opened.
    """

    def __init__(self, path: Path | None = None, *, read_only: bool = False, busy_timeout_s: float = BUSY_TIMEOUT_S):
        self.path = path
        self.read_only = read_only
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.RLock()
        self.journal_mode = ""
        self._db = self._open_or_replace()

    def _open_or_replace(self) -> Database:
        try:
            return self._open()
        except sqlite3.DatabaseError as cause:
            if not self._is_damaged(cause):
                raise StoreError(f"{self.path} must be a readable SQLite database (got {cause})") from cause
            return self._replace()
        except OSError as cause:
            raise StoreError(f"{self.path} must be in a folder that can be written (got {cause})") from cause

    def _is_damaged(self, error: sqlite3.DatabaseError) -> bool:
        """Whether the file itself is corrupt and ours to replace: not locked, not forbidden, no mistake in a statement.

        sqlite3 raises DatabaseError itself for SQLITE_CORRUPT and SQLITE_NOTADB, and a subclass for all else.
        """
        return type(error) is sqlite3.DatabaseError and not self.read_only and self.path is not None

    def _replace(self) -> Database:
        """Moves the corrupt file aside and begins anew; of several processes that find it corrupt, one does it."""
        assert self.path is not None
        try:
            with exclusive(self.path.with_name(self.path.name + ".lock")):
                try:
                    return self._checked(self._open())
                except sqlite3.DatabaseError as cause:
                    if not self._is_damaged(cause):
                        raise
                    self._move_aside(cause)
                    return self._open()
        except (sqlite3.Error, OSError) as cause:
            raise StoreError(f"{self.path} is corrupt and could not be replaced ({cause})") from cause

    def _checked(self, db: Database) -> Database:
        """The database if no page of it is damaged; another process may have replaced the file already."""
        found = db.conn.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            db.conn.close()
            raise sqlite3.DatabaseError(found)
        return db

    def _open(self) -> Database:
        if self.path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        elif self.read_only:
            uri = f"{self.path.resolve().as_uri()}?mode=ro"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self.path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            db = Database(connection)
            self._check_schema(db)
            if not self.read_only:
                self.journal_mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
                connection.execute("PRAGMA synchronous = NORMAL")
                if connection.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
                    self._migrate(db)
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        return db

    def _check_schema(self, db: Database) -> None:
        """Refuses a newer schema and a file of another program; writes nothing."""
        db.conn.execute("BEGIN")  # one view of the file, while another process may be making it
        version = db.conn.execute("PRAGMA user_version").fetchone()[0]
        application = db.conn.execute("PRAGMA application_id").fetchone()[0]
        tables = db.conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        db.conn.commit()
        if tables and application != APPLICATION_ID:
            raise StoreError(f"{self.path} must be a tuning database or a new file (got a database of another program)")
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"{self.path} must have schema version {SCHEMA_VERSION} or older (got {version}); "
                "use the version of autodispatch that wrote it, or a newer one"
            )
        if self.read_only and version < 1:  # columns that older versions lack have defaults
            raise StoreError(f"{self.path} must have a schema to be read without writing (got version {version})")

    def _migrate(self, db: Database) -> None:
        with self._transaction(db):
            if db.execute("PRAGMA user_version").fetchone()[0] >= SCHEMA_VERSION:
                return  # another process was faster
            migrations.apply(db)
            applied = [m.name for m in migrations.applied(db)]
            if applied != list(STEPS):
                raise StoreError(f"{self.path} must have the migrations {', '.join(STEPS)} (got {', '.join(applied)})")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _move_aside(self, cause: Exception) -> None:
        assert self.path is not None
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S%f")
        aside = self.path.with_name(f"{self.path.name}.corrupt-{stamp}")
        # the main file last: until then, whoever opens it finds it corrupt and waits for the lock
        for suffix in ("-wal", "-shm", ""):
            part = self.path.with_name(self.path.name + suffix)
            if part.exists():
                os.replace(part, aside.with_name(aside.name + suffix))
        _log.warning("the tuning database %s is corrupt (%s); moved to %s and begun anew", self.path, cause, aside)

    @contextmanager
    def _transaction(self, db: Database) -> Iterator[None]:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            db.conn.rollback()
            raise
        db.conn.commit()

    def _run(self, work: Callable[[Database], T]) -> T:
        """Does the work; if the file turns out corrupt, once more on a new one. Raises StoreError."""
        with self._lock:
            try:
                try:
                    return work(self._db)
                except sqlite3.DatabaseError as cause:
                    if not self._is_damaged(cause):
                        raise
                    self._db.conn.close()
                    self._db = self._replace()
                    return work(self._db)
            except sqlite3.Error as cause:
                raise StoreError(f"{self.path or 'the store in memory'} could not be used ({cause})") from cause

    def write(self, work: Callable[[Database], T]) -> T:
        """Does the work in one transaction. Raises StoreError, also where the store is read-only."""
        if self.read_only:
            raise StoreError(f"{self.path} must be writable (it was opened read-only)")

        def within(db: Database) -> T:
            with self._transaction(db):
                return work(db)

        return self._run(within)

    def close(self) -> None:
        with self._lock:
            self._db.conn.close()

    # writing

    def begin_session(self, device: DeviceRecord, environment: EnvironmentRecord, session: SessionRecord) -> None:
        """Stores a session and what it refers to."""

        def work(db: Database) -> None:
            _insert(db, "devices", device)
            _insert(db, "environments", environment)
            _insert(db, "sessions", session)

        self.write(work)

    def add_measurement(self, record: MeasurementRecord) -> bool:
        """Stores a measurement; False if it is there already. Measurements are never changed."""
        return self.write(lambda db: _insert(db, "measurements", record))

    def set_decision(self, record: DecisionRecord) -> None:
        """Stores what was decided for a problem, in place of an earlier decision."""
        self.write(lambda db: _upsert_decision(db, record))

    def add_all(self, records: Sequence[Record], *, replace_decisions: bool = False) -> dict[str, int]:
        """Stores records of any kind in one transaction, in the order given, and counts those that were new.

        A decision that is there already is kept, unless `replace_decisions`.
        """

        def work(db: Database) -> dict[str, int]:
            added = {"devices": 0, "environments": 0, "sessions": 0, "measurements": 0, "decisions": 0}
            for record in records:
                if isinstance(record, DecisionRecord):
                    if replace_decisions or _find_decision(db, record) is None:
                        _upsert_decision(db, record)
                        added["decisions"] += 1
                else:
                    table = TABLES[type(record)]
                    added[table] += _insert(db, table, record)
            return added

        return self.write(work)

    def record_miss(self, device_key: str, problem: Problem) -> None:
        """Counts a problem that a call asked for and no layer knew."""
        values = {"device_key": device_key, **problem_fields(problem), "count": 1, "last_seen": now()}
        columns = ", ".join(values)
        sql = (
            f"INSERT INTO misses ({columns}) VALUES ({', '.join('?' * len(values))}) "
            f"ON CONFLICT (device_key, {', '.join(_SAME_PROBLEM)}, m) "
            "DO UPDATE SET count = count + 1, last_seen = excluded.last_seen"
        )
        self.write(lambda db: db.execute(sql, tuple(values.values())))

    # reading

    def decision(self, device_key: str, problem: Problem, regime: str | None = None) -> DecisionRecord | None:
        """The decision for exactly this problem; the newest one if no regime is given."""
        found = self._decisions(device_key, problem, regime, f"{_equal(('m',))}", (problem.m,))
        return found[0] if found else None

    def decisions_for_any_m(self, device_key: str, problem: Problem) -> list[DecisionRecord]:
        """All decisions that differ from the problem in m at most, newest first."""
        return self._decisions(device_key, problem, None, "1", ())

    def _decisions(
        self, device_key: str, problem: Problem, regime: str | None, condition: str, values: tuple[Any, ...]
    ) -> list[DecisionRecord]:
        sql = f"SELECT * FROM decisions WHERE {_equal(('device_key', *_SAME_PROBLEM))} AND {condition}"
        parameters = (device_key, *(getattr(problem, f) for f in _SAME_PROBLEM), *values)
        if regime is not None:
            sql += " AND regime = ?"
            parameters = (*parameters, regime)
        rows = self._run(lambda db: list(db.query(f"{sql} ORDER BY decided_at DESC, regime", parameters)))
        return _good(DecisionRecord, rows)

    def measurement(self, measurement_id: str) -> MeasurementRecord | None:
        rows = self._run(lambda db: list(db.query("SELECT * FROM measurements WHERE id = ?", (measurement_id,))))
        found = _good(MeasurementRecord, rows)
        return found[0] if found else None

    def measurements(self, device_key: str | None = None, problem: Problem | None = None) -> list[MeasurementRecord]:
        """Measurements, fastest first within a problem; of one device or problem if given."""
        fields: dict[str, Any] = {} if device_key is None else {"device_key": device_key}
        fields |= {} if problem is None else problem_fields(problem)
        where = f" WHERE {_equal(tuple(fields))}" if fields else ""
        order = " ORDER BY device_key, n, k, dtype, layout, m, median_us IS NULL, median_us, id"
        rows = self._run(lambda db: list(db.query(f"SELECT * FROM measurements{where}{order}", tuple(fields.values()))))
        return _good(MeasurementRecord, rows)

    def screened(
        self, device_key: str, problem: Problem, regime: str, environment_id: str, protocol_version: int
    ) -> list[MeasurementRecord]:
        """The screenings of a problem that were made with the same versions and protocol, the newest last."""
        fields = {"device_key": device_key, **problem_fields(problem), "regime": regime, "stage": "screen"}
        sessions = "SELECT id FROM sessions WHERE environment_id = ? AND protocol_version = ?"
        sql = f"SELECT * FROM measurements WHERE {_equal(tuple(fields))} AND session_id IN ({sessions})"
        values = (*fields.values(), environment_id, protocol_version)
        rows = self._run(lambda db: list(db.query(f"{sql} ORDER BY measured_at, id", values)))
        return _good(MeasurementRecord, rows)

    def all_of(self, record_type: type[Any], device_key: str | None = None) -> list[Any]:
        """Every record of one type, in a stable order; of one device if given."""
        return _good(record_type, self.rows(record_type, device_key))

    def rows(self, record_type: type[Any], device_key: str | None = None) -> list[dict[str, Any]]:
        """The rows of `all_of` as they are stored, for a reader that does not trust them."""
        table = TABLES[record_type]
        column = "key" if table == "devices" else "device_key"
        filtered = device_key is not None and table != "environments"
        where = f" WHERE {column} = ?" if filtered else ""
        key = ORDER[table]
        sql = f"SELECT * FROM {table}{where} ORDER BY {key}"
        return self._run(lambda db: list(db.query(sql, (device_key,) if filtered else ())))

    def similar_devices(self, device: DeviceRecord, problem: Problem) -> list[DeviceRecord]:
        """Other devices of the same name or compute capability for which the problem's n and k were decided."""
        sql = (
            "SELECT * FROM devices WHERE key <> ? AND kind = ? AND (name = ? OR compute_capability = ?) AND EXISTS "
            "(SELECT 1 FROM decisions WHERE device_key = devices.key AND n = ? AND k = ? AND dtype = ?) ORDER BY key"
        )
        values = (
            device.key,
            device.kind,
            device.name,
            device.compute_capability,
            problem.n,
            problem.k,
            problem.dtype,
        )
        return _good(DeviceRecord, self._run(lambda db: list(db.query(sql, values))))

    def misses(self) -> list[dict[str, Any]]:
        """Problems that were asked for and not found, most wanted first."""
        return self._run(lambda db: list(db.query("SELECT * FROM misses ORDER BY count DESC, device_key, n, k, m")))

    def counts(self) -> dict[str, int]:
        """How many rows each table holds."""
        tables = (*TABLES.values(), "misses")
        return {t: self._run(lambda db, t=t: db[t].count) for t in tables}  # type: ignore[misc]

    def copy_to(self, path: Path) -> None:
        """Writes a consistent copy, also while others write, under a temporary name first."""
        draft = path.with_name(path.name + ".part")
        draft.unlink(missing_ok=True)
        self._run(lambda db: db.execute("VACUUM INTO ?", (str(draft),)))
        os.replace(draft, path)


TABLES: dict[type[Any], str] = {
    DeviceRecord: "devices",
    EnvironmentRecord: "environments",
    SessionRecord: "sessions",
    MeasurementRecord: "measurements",
    DecisionRecord: "decisions",
}
ORDER = {
    "devices": "key",
    "environments": "id",
    "sessions": "started_at, id",
    "measurements": "device_key, n, k, dtype, layout, m, variant, config, id",
    "decisions": "device_key, n, k, dtype, layout, m, alignment, activation, precision, math, regime",
}


def _equal(columns: tuple[str, ...]) -> str:
    return " AND ".join(f"{c} = ?" for c in columns)


def _insert(db: Database, table: str, record: Record) -> bool:
    before: int = db.conn.total_changes
    columns = type(record).columns()
    # by hand: the library's insert builds its statement anew for every row, which is most of the time of a large import
    sql = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    db.conn.execute(sql, tuple(_row(record).values()))
    return bool(db.conn.total_changes > before)


def _upsert_decision(db: Database, record: DecisionRecord) -> None:
    db["decisions"].insert(_row(record), replace=True)  # type: ignore[union-attr]


def _find_decision(db: Database, record: DecisionRecord) -> Any:
    columns = ("device_key", *PROBLEM_FIELDS, "regime")
    sql = f"SELECT 1 FROM decisions WHERE {_equal(columns)}"
    return db.execute(sql, tuple(getattr(record, c) for c in columns)).fetchone()


def _row(record: Record) -> dict[str, Any]:
    values = record.model_dump()
    return {k: json.dumps(v) if k in _JSON_COLUMNS else v for k, v in values.items()}


def _good(record_type: type[Any], rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The rows as records; one that somebody spoiled is left out with a warning."""
    found = []
    for row in rows:
        try:
            record = as_record(record_type, row)
            if isinstance(record, ProblemRecord):
                _ = record.problem  # of values that this version knows
            found.append(record)
        except (ValidationError, ValueError, TypeError) as cause:
            _log.warning("a row of %s is not a record and is left out: %s", TABLES[record_type], cause)
    return found


def as_record(record_type: type[Any], row: dict[str, Any]) -> Any:
    """A row as a record. Raises pydantic's ValidationError, or ValueError for broken JSON."""
    values = {k: json.loads(v) if k in _JSON_COLUMNS else v for k, v in row.items()}
    return record_type(**values)
