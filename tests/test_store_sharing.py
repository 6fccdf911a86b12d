"""Many processes and threads on one database: nothing measured is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autodispatch import database
from autodispatch.errors import StoreError
from autodispatch.store import TuningStore
from tests.stored import CPU, PROBLEM, begin, filled, measurement

WRITER = """
import sys, time
from pathlib import Path
from tests.stored import begin, measurement
from autodispatch.store import TuningStore
store = TuningStore(Path(sys.argv[1]))
begin(store, session=f"s{sys.argv[2]}")
for i in range(int(sys.argv[3])):
    store.add_measurement(measurement(median=1.0 + i, session=f"s{sys.argv[2]}"))
    print(i, flush=True)
"""


def test_sixteen_processes_lose_nothing(tmp_path: Path) -> None:
    path, root = tmp_path / "tuning.db", Path(__file__).parent.parent
    words = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen([*words, str(i), "100"], cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for i in range(16)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=240)
        assert writer.returncode == 0, errors.decode()
    assert TuningStore(path).counts() == {
        "devices": 1,
        "environments": 1,
        "sessions": 16,
        "measurements": 1600,
        "decisions": 0,
        "misses": 0,
    }


def test_a_killed_process_leaves_what_it_had_stored(tmp_path: Path) -> None:
    path, root = tmp_path / "tuning.db", Path(__file__).parent.parent
    words = [sys.executable, "-c", WRITER, str(path), "1", "100000"]
    writer = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    seen = [int(writer.stdout.readline()) for _ in range(20)][-1]
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    store = TuningStore(path)
    assert store.counts()["measurements"] > seen
    assert store._run(lambda db: db.execute("PRAGMA integrity_check").fetchone()[0]) == "ok"


def test_a_writer_waits_for_another_and_a_reader_does_not(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    filled(store)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    start = time.monotonic()
    assert store.decision(CPU.key, PROBLEM) is not None
    threading.Timer(0.3, other.commit).start()
    store.record_miss(CPU.key, PROBLEM)
    assert 0.2 < time.monotonic() - start < 30


def test_a_lock_that_is_never_given_back_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path, busy_timeout_s=0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.record_miss(CPU.key, PROBLEM)
    assert not list(tmp_path.glob("*.corrupt-*"))


@pytest.mark.parametrize("message", ["database is locked", "disk I/O error"])
def test_opening_that_is_refused_without_waiting_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    refusals = 3
    whole = database.TuningDatabase._open_at_once

    def refusing(self: database.TuningDatabase) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise sqlite3.OperationalError(message)
        return whole(self)

    monkeypatch.setattr(database.TuningDatabase, "_open_at_once", refusing)
    store = TuningStore(tmp_path / "t.db")
    assert (refusals, store.journal_mode) == (-1, "wal")
    store.close()
    refusals = 10**9
    monkeypatch.setattr(database, "_SETTLING_S", 0.05)
    with pytest.raises(StoreError, match=message):
        TuningStore(tmp_path / "t.db")


def test_threads_share_a_store(store: TuningStore) -> None:
    begin(store)

    def work(offset: int) -> None:
        for i in range(50):
            store.add_measurement(measurement(median=1.0 + offset * 50 + i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counts()["measurements"] == 400
    assert multiprocessing.active_children() == []


OPENER = """
import sys
from pathlib import Path
from tests.stored import begin
from autodispatch.store import TuningStore
sys.stdin.readline()
begin(TuningStore(Path(sys.argv[1])), session=sys.argv[2])
"""


@pytest.mark.parametrize("content", [None, b"not a database " * 600], ids=["absent", "corrupt"])
def test_processes_that_open_a_file_at_once_agree_on_one_database(tmp_path: Path, content: bytes | None) -> None:
    root = Path(__file__).parent.parent
    for attempt in range(3):
        path = tmp_path / str(attempt) / "tuning.db"
        path.parent.mkdir()
        if content is not None:
            path.write_bytes(content)
        words = [sys.executable, "-c", OPENER, str(path)]
        openers = [
            subprocess.Popen([*words, f"s{i}"], cwd=root, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for i in range(8)
        ]
        for opener in openers:
            assert opener.stdin is not None
            opener.stdin.write("go\n")
            opener.stdin.flush()
        for opener in openers:
            _, errors = opener.communicate(timeout=120)
            assert opener.returncode == 0, errors
        assert TuningStore(path).counts()["sessions"] == 8
        assert len(list(path.parent.glob("*.corrupt-*"))) == (content is not None)
