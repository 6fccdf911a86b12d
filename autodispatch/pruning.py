"""What leaves a tuning database again: by age, kernels that have changed, device, failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from sqlite_utils import Database

from autodispatch.records import MeasurementRecord
from autodispatch.store import TABLES, TuningStore
from autodispatch.variants import Registry

_UNUSED = (  # in this order, each after what refers to it
    ("sessions", "id NOT IN (SELECT session_id FROM measurements) AND id NOT IN (SELECT session_id FROM decisions)"),
    ("environments", "id NOT IN (SELECT environment_id FROM sessions)"),
    ("devices", "key NOT IN (SELECT device_key FROM measurements) AND key NOT IN (SELECT device_key FROM sessions)"),
)


@dataclass(frozen=True)
class Criteria:
    """Which measurements to drop: all that meet every criterion that is given.

    Attributes:
        older_than_days: measured before so many days.
        is_stale: of kernels that have changed since, or variants that are unknown.
        has_failed: that gave no time.
        device_key: of this device.
    """

    older_than_days: float | None = None
    is_stale: bool = False
    has_failed: bool = False
    device_key: str | None = None

    @property
    def is_empty(self) -> bool:
        return self == Criteria()


def select(
    store: TuningStore, criteria: Criteria, registry: Registry, now: datetime | None = None
) -> list[MeasurementRecord]:
    """The measurements that meet the criteria."""
    found: Iterable[MeasurementRecord] = store.measurements(criteria.device_key)
    if criteria.older_than_days is not None:
        end = (now or datetime.now(timezone.utc)) - timedelta(days=criteria.older_than_days)
        found = [r for r in found if datetime.fromisoformat(r.measured_at) < end]
    if criteria.is_stale:
        digests = {name: v.digest for name, v in registry.variants.items()}
        found = [r for r in found if digests.get(r.variant) != r.digest]
    if criteria.has_failed:
        found = [r for r in found if r.status != "ok"]
    return list(found)


def drop(store: TuningStore, measurements: Iterable[MeasurementRecord]) -> dict[str, int]:
    """Deletes measurements, the decisions that they lead, and what nothing refers to any more, in one transaction.

    Returns how many rows of each table went.
    """
    ids = [(r.id,) for r in measurements]

    def delete(db: Database) -> dict[str, int]:
        db.execute("CREATE TEMP TABLE dropped (id TEXT PRIMARY KEY)")
        db.conn.executemany("INSERT OR IGNORE INTO dropped VALUES (?)", ids)
        gone = {}
        wheres = (
            ("decisions", "leader IN (SELECT id FROM dropped)"),
            ("measurements", "id IN (SELECT id FROM dropped)"),
        )
        for table, where in (*wheres, *_UNUSED):
            gone[table] = db.execute(f"DELETE FROM {table} WHERE {where}").rowcount
        db.execute("DROP TABLE dropped")
        return gone

    return store.write(delete)


def clear(store: TuningStore) -> dict[str, int]:
    """Deletes all records, and what was missed. Returns how many rows of each table went."""
    tables = (*reversed(TABLES.values()), "misses")  # what refers to others first
    return store.write(lambda db: {t: db.execute(f"DELETE FROM {t}").rowcount for t in tables})
