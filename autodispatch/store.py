"""TuningStore: what was measured and decided, in a tuning database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json, to_json
from sqlite_utils import Database

from autodispatch.database import TuningDatabase
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
_JSON_COLUMNS = ("samples_us", "finalists", "ties")
_SAME_PROBLEM = tuple(f for f in PROBLEM_FIELDS if f != "m")

R = TypeVar("R", bound=Record)


class Added(NamedTuple):
    """How many records of each table were new, and how many decisions took the place of others."""

    new: dict[str, int]
    superseded: int


class _TakenBackError(Exception):
    """Ends the transaction of a dry run."""

    def __init__(self, added: Added) -> None:
        self.added = added


class TuningStore(TuningDatabase):
    """What one tuning database holds. See TuningDatabase for how it is opened."""

    # writing

    def begin_session(self, device: DeviceRecord, environment: EnvironmentRecord, session: SessionRecord) -> None:
        """Stores a session and what it refers to."""

        def work(db: Database) -> None:
            _insert(db, "devices", [device])
            _insert(db, "environments", [environment])
            _insert(db, "sessions", [session])

        self.write(work)

    def add_measurement(self, record: MeasurementRecord) -> bool:
        """Stores a measurement; False if it is there already. Measurements are never changed."""
        return bool(self.write(lambda db: _insert(db, "measurements", [record])))

    def set_decision(self, record: DecisionRecord) -> None:
        """Stores what was decided for a problem, in place of an earlier decision."""
        self.write(lambda db: _upsert_decision(db, record))

    def add_all(
        self,
        records: Sequence[Record],
        supersedes: Callable[[DecisionRecord, DecisionRecord], bool] = lambda new, old: False,
        *,
        dry_run: bool = False,
    ) -> Added:
        """Stores records of any kind in one transaction, in the order given; a dry run takes all of it back.

        A decision for what another one is there already takes its place if it `supersedes` it.
        """

        def work(db: Database) -> Added:
            new = dict.fromkeys(TABLES.values(), 0)
            superseded = 0
            for record_type, some in groupby(records, type):
                if record_type is not DecisionRecord:
                    new[TABLES[record_type]] += _insert(db, TABLES[record_type], some)
                    continue
                for record in some:
                    assert isinstance(record, DecisionRecord)
                    old = _find_decision(db, record)
                    if old is None or (old != record and supersedes(record, old)):
                        _upsert_decision(db, record)
                        new["decisions"] += old is None
                        superseded += old is not None
            if dry_run:
                raise _TakenBackError(Added(new, superseded))
            return Added(new, superseded)

        try:
            return self.write(work)
        except _TakenBackError as taken_back:
            return taken_back.added

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
        found = self.decisions(device_key, problem)
        return next((d for d in found if regime in (None, d.regime)), None)

    def decisions(self, device_key: str, problem: Problem) -> list[DecisionRecord]:
        """The decisions for exactly this problem, of all regimes, newest first."""
        return self._decisions(device_key, problem, "m = ?", (problem.m,))

    def near_decisions(
        self, device_key: str, problem: Problem, lowest_m: float, highest_m: float
    ) -> list[DecisionRecord]:
        """The decisions that differ from the problem in m alone, which lies within bounds, newest first."""
        return self._decisions(device_key, problem, "m <> ? AND m BETWEEN ? AND ?", (problem.m, lowest_m, highest_m))

    def _decisions(
        self, device_key: str, problem: Problem, condition: str, values: tuple[Any, ...]
    ) -> list[DecisionRecord]:
        same = _equal(("device_key", *_SAME_PROBLEM))
        sql = f"SELECT * FROM decisions WHERE {same} AND {condition} ORDER BY decided_at DESC, regime"
        parameters = (device_key, *(getattr(problem, f) for f in _SAME_PROBLEM), *values)
        return _good(DecisionRecord, self._run(lambda db: list(db.query(sql, parameters))))

    def measurement(self, measurement_id: str) -> MeasurementRecord | None:
        return self.one(MeasurementRecord, measurement_id)

    def one(self, record_type: type[R], identity: str) -> R | None:
        """The record of a type with this id (of a device: key)."""
        table = TABLES[record_type]
        sql = f"SELECT * FROM {table} WHERE {'key' if table == 'devices' else 'id'} = ?"
        found: list[R] = _good(record_type, self._run(lambda db: list(db.query(sql, (identity,)))))
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

    def missed_problems(self, device_key: str) -> list[Problem]:
        """What calls on a device asked for and did not find, and nobody has tuned since; most wanted first."""
        rows = [r for r in self.misses() if r["device_key"] == device_key]
        problems = [Problem(**{f: r[f] for f in PROBLEM_FIELDS}) for r in rows]
        return [p for p in problems if self.decision(device_key, p) is None]

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


def _insert(db: Database, table: str, records: Iterable[Record]) -> int:
    """Inserts records of one table and returns how many were not there yet."""
    before: int = db.conn.total_changes
    columns = next(t for t, name in TABLES.items() if name == table).columns()
    # by hand: the library's insert builds its statement anew for every row, which is most of the time of a large import
    sql = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    db.conn.executemany(sql, map(_row, records))
    return int(db.conn.total_changes - before)


def _upsert_decision(db: Database, record: DecisionRecord) -> None:
    row = dict(zip(record.columns(), _row(record), strict=True))
    db["decisions"].insert(row, replace=True)  # type: ignore[union-attr]


def _find_decision(db: Database, record: DecisionRecord) -> DecisionRecord | None:
    """The decision for the same; none where that is not one that can be read."""
    columns = ("device_key", *PROBLEM_FIELDS, "regime")
    sql = f"SELECT * FROM decisions WHERE {_equal(columns)}"
    found = _good(DecisionRecord, list(db.query(sql, tuple(getattr(record, c) for c in columns))))
    return found[0] if found else None


def _row(record: Record) -> tuple[Any, ...]:
    values = list(record.values())
    for i in _lists_of(type(record)):
        values[i] = to_json(values[i]).decode()
    return tuple(values)


@cache
def _lists_of(record_type: type[Record]) -> tuple[int, ...]:
    """Which columns hold a list, as JSON."""
    return tuple(i for i, column in enumerate(record_type.columns()) if column in _JSON_COLUMNS)


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
    lists = {c: from_json(row[c], allow_inf_nan=False) for c in _JSON_COLUMNS if c in row}
    return record_type(**{**row, **lists})
