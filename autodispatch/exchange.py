"""Carrying tuning records between machines: export to JSON Lines or SQLite, import of either.

An import takes known fields of known types and candidates that this version knows by name, and nothing else: no code,
no compiler options, no binaries. Merging is a union of sets; of two decisions for the same problem one made on this
host comes first, then a complete one, then the later one, then the larger hash: it may be repeated, in any order.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from autodispatch.errors import StoreError
from autodispatch.migrations import SCHEMA_VERSION
from autodispatch.records import (
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    ProblemRecord,
    Record,
    SessionRecord,
    content_hash,
)
from autodispatch.store import TABLES, TuningStore, as_record
from autodispatch.variants import Registry

FORMAT = "autodispatch-tuning"
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
_KINDS: dict[str, type[Record]] = {
    "device": DeviceRecord,
    "environment": EnvironmentRecord,
    "session": SessionRecord,
    "measurement": MeasurementRecord,
    "decision": DecisionRecord,
}
_NAMES = {record_type: name for name, record_type in _KINDS.items()}
_MEASUREMENT = b'{"record":"measurement",'  # how most lines of an export begin


@dataclass
class ImportReport:
    """What an import did: records added by table, decisions superseded by imported ones, records of the file that were
    there already or gave way to what was, and those rejected with the reason."""

    added: dict[str, int] = field(default_factory=dict)
    superseded: int = 0
    kept: int = 0
    rejected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Filter:
    """Which records an export holds: of one device, of some problems, and only those that decisions refer to."""

    device_key: str | None = None
    ms: tuple[int, ...] = ()
    n: int | None = None
    k: int | None = None
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    winners_only: bool = False

    def takes(self, record: ProblemRecord) -> bool:
        return (
            (not self.ms or record.m in self.ms)
            and self.n in (None, record.n)
            and self.k in (None, record.k)
            and (not self.dtypes or record.dtype in self.dtypes)
            and (not self.layouts or record.layout in self.layouts)
        )


ALL = Filter()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collector of cycles, which would look at each of many records again and again, and records
    have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def select(store: TuningStore, chosen: Filter = ALL) -> list[Record]:
    """The records that a filter takes and what they refer to, in a stable order."""
    device_key = chosen.device_key
    decisions = [d for d in store.all_of(DecisionRecord, device_key) if chosen.takes(d)]
    measurements = [m for m in store.all_of(MeasurementRecord, device_key) if chosen.takes(m)]
    sessions: list[SessionRecord] = store.all_of(SessionRecord, device_key)
    if chosen.winners_only:
        wanted = {i for d in decisions for i in d.finalists}
        measurements = [m for m in measurements if m.id in wanted]
    present = {m.id for m in measurements}
    decisions = [d for d in decisions if present.issuperset(d.finalists)]  # but for rows that cannot be read
    is_whole = chosen == Filter(device_key)
    if not is_whole:
        used = {r.session_id for r in (*measurements, *decisions)}
        sessions = [s for s in sessions if s.id in used]
    environments = {s.environment_id for s in sessions}
    devices = {s.device_key for s in sessions}
    return [
        *(d for d in store.all_of(DeviceRecord, device_key) if is_whole or d.key in devices),
        *(e for e in store.all_of(EnvironmentRecord) if e.id in environments),
        *sessions,
        *measurements,
        *decisions,
    ]


def export_jsonl(store: TuningStore, path: Path, chosen: Filter = ALL) -> int:
    """Writes records as JSON Lines, a header first, in a stable order, under a temporary name first.

    Returns the number of records.
    """
    with _uncollected():
        records = select(store, chosen)
    commands = {r.command for r in records if isinstance(r, SessionRecord) and r.command}
    header = {"format": FORMAT, "schema": SCHEMA_VERSION, "commands": sorted(commands)}
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(to_json(header) + b"\n")
        for record in records:
            file.write(b'{"record":"%b",%b\n' % (_NAMES[type(record)].encode(), to_json(record)[1:]))
    os.replace(draft, path)
    return len(records)


def export_sqlite(store: TuningStore, path: Path, chosen: Filter = ALL) -> int:
    """Writes records as a database: a consistent copy of all, or what a filter takes. Returns the number of records."""
    if chosen != ALL:
        part = TuningStore()
        part.add_all(select(store, chosen))
        store = part
    store.copy_to(path)
    counts = store.counts()
    return sum(counts[table] for table in TABLES.values())


def import_file(
    store: TuningStore,
    path: Path,
    registry: Registry | None = None,
    *,
    replace_decisions: bool = False,
    dry_run: bool = False,
) -> ImportReport:
    """Reads a JSON Lines or SQLite export into the store, in one transaction, which a dry run takes back.

    With `replace_decisions` imported decisions take the place of all others, those made on this host too. Raises
    StoreError for a file that is neither, or too large; a bad record is rejected by itself and reported.
    """
    if not path.is_file():
        raise StoreError(f"{path} must be a file to import (got none)")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise StoreError(f"{path} must have at most {MAX_FILE_BYTES} bytes (got {size})")
    with path.open("rb") as file:
        is_sqlite = file.read(16) == b"SQLite format 3\0"
    candidates = _from_sqlite(path) if is_sqlite else _from_jsonl(path)
    with _uncollected():
        records, rejected = _sound(candidates, registry or Registry())
    here = socket.gethostname()

    @cache
    def is_local(session_id: str) -> bool:  # asked within the transaction, when the sessions of the file are there too
        session = store.one(SessionRecord, session_id)
        return session is not None and session.host == here

    def supersedes(new: DecisionRecord, old: DecisionRecord) -> bool:
        ranks = [(is_local(d.session_id), d.complete, d.decided_at, content_hash(d.content())) for d in (new, old)]
        return replace_decisions or ranks[0] > ranks[1]

    with _uncollected():
        added = store.add_all(records, supersedes, dry_run=dry_run)
    kept = len(records) - sum(added.new.values()) - added.superseded
    return ImportReport(added.new, added.superseded, kept, rejected)


def load_seeds(paths: Iterable[Path]) -> TuningStore:
    """The shipped records in a store in memory."""
    store = TuningStore()
    for path in paths:
        import_file(store, path)
    return store


def _sound(candidates: Iterator[Record | str], registry: Registry) -> tuple[list[Record], list[str]]:
    """The records that can be taken, and why others cannot."""
    rejected: list[str] = []
    records: list[Record] = []
    known: dict[str, set[str]] = {"devices": set(), "environments": set(), "sessions": set()}
    measurements: dict[str, MeasurementRecord] = {}

    @cache  # of a few candidates there are many measurements
    def unknown(variant: str, config: str) -> str | None:
        try:
            registry.parse(variant, config)
        except ValueError as cause:
            return str(cause)
        return None

    for item in candidates:
        reason = item if isinstance(item, str) else _reason_against(item, unknown, known, measurements)
        if reason:
            rejected.append(reason)
        elif isinstance(item, Record):
            records.append(item)
            if isinstance(item, MeasurementRecord):
                measurements[item.id] = item
            elif not isinstance(item, DecisionRecord):
                known[TABLES[type(item)]].add(_identity(item))
    return records, rejected


def _reason_against(
    record: Record,
    unknown: Callable[[str, str], str | None],
    known: dict[str, set[str]],
    measurements: dict[str, MeasurementRecord],
) -> str | None:
    """Why a well-formed record is not taken, or None. `unknown` says so of a variant and its config."""
    if isinstance(record, MeasurementRecord):
        if record.content_id != record.id:
            return f"measurement {record.id}: its id does not fit its content"
        if record.status == "ok" and record.median_us is None:
            return f"measurement {record.id}: it is ok but has no time"
        try:
            _ = record.problem
        except ValueError as cause:
            return f"measurement {record.id}: {cause}"
        reason = unknown(record.variant, record.config)
        if reason is not None:
            return f"measurement {record.id}: {reason}"
        if record.session_id not in known["sessions"] or record.device_key not in known["devices"]:
            return f"measurement {record.id}: its session or device is missing"
    elif isinstance(record, SessionRecord):
        if record.device_key not in known["devices"] or record.environment_id not in known["environments"]:
            return f"session {record.id}: its device or environment is missing"
    elif isinstance(record, EnvironmentRecord):
        if EnvironmentRecord.of({k: v for k, v in record.content().items() if k != "id"}).id != record.id:
            return f"environment {record.id}: its id does not fit its content"
    elif isinstance(record, DecisionRecord):
        name = f"decision {record.m},{record.n},{record.k} {record.dtype} {record.layout}"
        try:
            _ = record.problem
        except ValueError as cause:
            return f"{name}: {cause}"
        if record.leader not in record.finalists:
            return f"{name}: its leader is not one of its finalists"
        if any(i not in measurements for i in record.finalists):
            return f"{name}: a measurement of its finalists is missing"
        for measurement in (measurements[i] for i in record.finalists):
            if measurement.status != "ok" or measurement.device_key != record.device_key:
                return f"{name}: a finalist was not measured on its device"
            if measurement.problem != record.problem:
                return f"{name}: a finalist was measured on another problem"
        if record.session_id not in known["sessions"] or record.device_key not in known["devices"]:
            return f"{name}: its session or device is missing"
    return None


def _identity(record: Any) -> str:
    return str(record.key if isinstance(record, DeviceRecord) else record.id)


def _from_jsonl(path: Path) -> Iterator[Record | str]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise StoreError(
                    f"{path} must have lines of at most {MAX_LINE_BYTES} bytes (got more in line {number})"
                )
            if number > 1 and line.startswith(_MEASUREMENT):  # straight into a record
                try:
                    yield MeasurementRecord.model_validate_json(b"{" + line[len(_MEASUREMENT) :])
                except ValidationError as cause:
                    yield f"line {number}: {_short(cause)}"
                continue
            try:
                content = from_json(line, allow_inf_nan=False)
            except ValueError as cause:
                if number == 1:
                    raise StoreError(f"{path} must be JSON Lines or SQLite (got neither: {cause})") from cause
                yield f"line {number}: not JSON ({cause})"
                continue
            if number == 1:
                _check_header(path, content)
                continue
            yield _parse(content, f"line {number}")


def _check_header(path: Path, content: Any) -> None:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{path} must begin with a header of format {FORMAT!r} (got {str(content)[:80]})")
    schema = content.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        raise StoreError(f"{path} must have schema {SCHEMA_VERSION} or older (got {schema}); use a newer autodispatch")


def _parse(content: Any, where: str) -> Record | str:
    if not isinstance(content, dict) or content.get("record") not in _KINDS:
        return f"{where}: record must be one of {', '.join(_KINDS)}"
    record_type = _KINDS[content.pop("record")]
    try:
        return record_type.model_validate(content)
    except ValidationError as cause:
        return f"{where}: {_short(cause)}"


def _from_sqlite(path: Path) -> Iterator[Record | str]:
    source = TuningStore(path, read_only=True)
    try:
        for record_type, table in TABLES.items():
            for i, row in enumerate(source.rows(record_type)):
                try:
                    yield as_record(record_type, row)
                except (ValidationError, ValueError, TypeError, RecursionError) as cause:
                    yield f"{table} row {i + 1}: {_short(cause)}"
    finally:
        source.close()


def _short(cause: Exception) -> str:
    if isinstance(cause, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in cause.errors()[:3])
    return str(cause)[:200]
