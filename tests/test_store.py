"""The store: nothing measured is lost, nothing foreign is written to, and a broken file stops nobody."""

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

import pytest

from autodispatch import resources
from autodispatch.device import cpu_device, environment
from autodispatch.errors import StoreError
from autodispatch.layers import Layers
from autodispatch.migrations import APPLICATION_ID, INITIAL, SCHEMA_VERSION, TIES
from autodispatch.problem import Problem
from autodispatch.records import (
    DecisionRecord,
    DeviceRecord,
    EnvironmentRecord,
    MeasurementRecord,
    SessionRecord,
    problem_fields,
)
from autodispatch.store import TuningStore

CPU = cpu_device()
PROBLEM = Problem(8, 16, 32, "float32")


def begin(store: TuningStore, session: str = "s1") -> None:
    env = EnvironmentRecord.of(environment(CPU))
    record = SessionRecord(
        id=session,
        device_key=CPU.key,
        environment_id=env.id,
        started_at="2026-01-01T00:00:00+00:00",
        host="h",
        command="c",
        protocol_version=1,
    )
    store.begin_session(DeviceRecord.of(CPU), env, record)


def measurement(
    problem: Problem = PROBLEM, median: float = 10.0, session: str = "s1", **more: object
) -> MeasurementRecord:
    fields: dict[str, object] = {
        "session_id": session,
        "device_key": CPU.key,
        **problem_fields(problem),
        "regime": "eager-cold",
        "stage": "final",
        "variant": "cpu_split",
        "config": "{}",
        "digest": "d",
        "status": "ok",
        "reason": "",
        "median_us": median,
        "p20_us": median,
        "p80_us": median,
        "mad_us": 0.0,
        "samples_us": [median],
        "workspace_bytes": 0,
        "measured_at": "2026-01-01T00:00:00+00:00",
    }
    return MeasurementRecord.of(**{**fields, **more})


def decision(problem: Problem, leader: MeasurementRecord, at: str = "2026-01-01T00:00:00+00:00") -> DecisionRecord:
    return DecisionRecord(
        device_key=CPU.key,
        **problem_fields(problem),
        regime=leader.regime,
        leader=leader.id,
        finalists=[leader.id],
        session_id=leader.session_id,
        decided_at=at,
    )


def filled(store: TuningStore, problem: Problem = PROBLEM, median: float = 10.0) -> DecisionRecord:
    begin(store)
    record = measurement(problem, median)
    store.add_measurement(record)
    made = decision(problem, record)
    store.set_decision(made)
    return made


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
    near = store.decisions_for_any_m(CPU.key, Problem(999, 16, 32, "float32"))
    assert [d.m for d in near] == [8]
    assert store.decisions_for_any_m(CPU.key, Problem(8, 17, 32, "float32")) == []
    assert store.counts()["decisions"] == 1


@pytest.mark.parametrize("field", ["dtype", "layout", "alignment", "precision", "math", "n", "k"])
def test_every_field_of_the_problem_must_match(store: TuningStore, field: str) -> None:
    filled(store)
    other = {"dtype": "float16", "layout": "nk", "alignment": 8, "precision": "tf32", "math": "fast", "n": 17, "k": 33}
    changed = Problem(**{**problem_fields(PROBLEM), field: other[field]})
    assert store.decision(CPU.key, changed) is None
    assert store.decisions_for_any_m(CPU.key, changed) == []


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


def test_the_documented_schema_is_that_of_the_migrations() -> None:
    text = resources.schema().read_text()
    assert text.split("\n\n", 1)[1] == ";\n\n".join((*INITIAL, *TIES)) + ";\n"


# files that are not as they should be


@pytest.mark.parametrize("damage", ["garbage", "cut", "page"])
def test_a_corrupt_file_is_moved_aside_and_begun_anew_with_one_warning(
    tmp_path: Path, warnings_logged: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    filled(store)
    for i in range(200):
        store.add_measurement(measurement(median=20.0 + i))
    store._run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
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
    store._run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))
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


# layers


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


# many at once

WRITER = """
import sys, time
from pathlib import Path
from tests.test_store import begin, measurement
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
from tests.test_store import begin
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
    assert [d.m for d in store.decisions_for_any_m(CPU.key, PROBLEM)] == [16]
    assert "is not a record and is left out" in warnings_logged.text
