"""TuningDatabase: a SQLite file that is opened, migrated, shared, and moved aside when it is corrupt.

Every write is one short BEGIN IMMEDIATE transaction.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from sqlite_utils import Database

from autodispatch.errors import StoreError
from autodispatch.locks import exclusive
from autodispatch.migrations import APPLICATION_ID, SCHEMA_VERSION, STEPS, migrations

_log = logging.getLogger("autodispatch")
BUSY_TIMEOUT_S = 60.0
_SETTLING_S = 2.0  # for what other processes do to a file that they open at the same moment

_MOUNTS = Path("/proc/self/mountinfo")
# WAL needs memory that all processes share, which those of two hosts do not
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "gluster",
    "weka",
    "panfs",
    "vbox",
    "virtiofs",
    "fuse.",
)

T = TypeVar("T")


def is_on_network(path: Path) -> bool:
    """Whether a file lies on a network file system, as far as the system tells (Linux)."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").split("\n")
        resolved = path.resolve()
    except OSError:
        return False
    longest, kind = Path("/"), ""
    for line in filter(None, lines):  # fields, "-", the kind of file system; blanks and the like in names are octal
        fields, _, rest = line.partition(" - ")
        mount = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields.split(" ")[4]))
        if resolved.is_relative_to(mount) and len(mount.parts) >= len(longest.parts):
            longest, kind = mount, rest.split(" ")[0]
    return kind == "fuse" or kind.startswith(_NETWORK)


class TuningDatabase:
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
        """Opened; tried again for a while where SQLite refuses without waiting: one of two that turn a new file to WAL
        at once, and one that meets a corrupt file while another moves it, and its log, aside."""
        end = time.monotonic() + _SETTLING_S
        while True:
            try:
                return self._open_at_once()
            except sqlite3.OperationalError as cause:
                if not any(x in str(cause) for x in ("locked", "disk I/O error")) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _open_at_once(self) -> Database:
        if self.path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        elif self.read_only:
            connection = self._connect_read_only()
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
                wanted = "TRUNCATE" if self.path is not None and is_on_network(self.path) else "WAL"
                self.journal_mode = str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
                connection.execute("PRAGMA synchronous = NORMAL")
                if connection.execute("PRAGMA user_version").fetchone()[0] < SCHEMA_VERSION:
                    self._migrate(db)
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        return db

    def _connect_read_only(self) -> sqlite3.Connection:
        """Shares the file with its writers; where SQLite cannot, since the side files of WAL mode are not there and
        cannot be made, opens it as one that does not change."""
        assert self.path is not None
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError as cause:
            connection.close()
            log = self.path.with_name(self.path.name + "-wal")
            if "unable to open" not in str(cause) or (log.exists() and log.stat().st_size):
                raise
            connection = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None, check_same_thread=False)
        return connection

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

    def version(self) -> int:
        """A number that changes when another connection, of whatever process, has written. Raises StoreError."""
        return int(self._run(lambda db: db.execute("PRAGMA data_version").fetchone()[0]))

    def close(self) -> None:
        with self._lock:
            self._db.conn.close()
