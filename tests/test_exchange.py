"""Carrying records: complete, repeatable, in any order, and unmoved by hostile files."""

from __future__ import annotations

import hashlib
import json
import pickle
import sqlite3
import warnings
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autodispatch import exchange
from autodispatch.errors import StoreError
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord, DeviceRecord, MeasurementRecord, SessionRecord, content_hash
from autodispatch.store import TABLES, TuningStore
from autodispatch.variants import VARIANTS
from tests.stored import CPU, PROBLEM, SEEDS, begin, decision, filled, measurement

KINDS = (MeasurementRecord, DecisionRecord, SessionRecord)


def content(store: TuningStore) -> dict[str, list[Any]]:
    return {table: store.all_of(record_type) for record_type, table in TABLES.items()}


def example(*medians: float) -> TuningStore:
    store = TuningStore()
    for i, median in enumerate(medians):
        filled(store, Problem(8 * (i + 1), 16, 32, "float32"), median)
    store.add_measurement(measurement(median=99.0, variant="cpu_fused", config='{"tile_m":64,"tile_n":128}'))
    return store


@pytest.mark.parametrize("suffix", [".jsonl", ".db"])
def test_everything_survives_the_journey(tmp_path: Path, suffix: str) -> None:
    source, path = example(10.0, 11.0), tmp_path / f"x{suffix}"
    write = exchange.export_jsonl if suffix == ".jsonl" else exchange.export_sqlite
    assert write(source, path) == sum(len(rows) for rows in content(source).values())
    target = TuningStore(tmp_path / "target.db")
    report = exchange.import_file(target, path)
    assert (report.kept, report.rejected) == (0, [])
    assert content(target) == content(source)
    again = exchange.import_file(target, path)
    assert sum(again.added.values()) == 0
    assert content(target) == content(source)


def test_merging_does_not_depend_on_the_order(tmp_path: Path) -> None:
    paths = []
    for name, store in (("a", example(10.0, 11.0)), ("b", example(10.0, 12.0, 13.0))):
        paths.append(tmp_path / f"{name}.jsonl")
        exchange.export_jsonl(store, paths[-1])
    results = []
    for order in (paths, paths[::-1], [*paths, paths[1]]):
        target = TuningStore()
        for path in order:
            exchange.import_file(target, path)
        results.append(content(target))
    assert results[0] == results[1] == results[2]


HERE, DAYS = "here", ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00", "2027-01-01T00:00:00+00:00")
entries = st.tuples(
    st.sampled_from([8, 16]),  # m
    st.sampled_from([9.0, 10.0, 11.0]),
    st.sampled_from([HERE, "there", "elsewhere"]),
    st.sampled_from(DAYS),
    st.booleans(),
)


def stored_decisions(path: Path, entries: list[tuple[int, float, str, str, bool]]) -> Path:
    """An export that holds one measurement and decision for each entry, later ones over earlier ones."""
    store = TuningStore()
    for m, median, host, day, complete in entries:
        problem = Problem(m, 16, 32, "float32")
        begin(store, host, host=host)
        record = measurement(problem, median, session=host)
        store.add_measurement(record)
        store.set_decision(decision(problem, record, day).model_copy(update={"complete": complete}))
    exchange.export_jsonl(store, path)
    return path


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(entries, min_size=1, max_size=3), min_size=2, max_size=3), st.randoms())
def test_merging_is_commutative_associative_and_idempotent(
    files: list[list[tuple[int, float, str, str, bool]]], random: Random
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.socket, "gethostname", lambda: HERE)
        paths = [stored_decisions(Path(folder) / f"{i}.jsonl", found) for i, found in enumerate(files)]

        def merged(order: list[Path]) -> dict[str, list[Any]]:
            target = TuningStore()
            for path in order:
                exchange.import_file(target, path)
            return content(target)

        expected = merged(paths)
        assert merged([*paths, *paths]) == expected
        assert merged(random.sample(paths, len(paths))) == expected
        later, first = TuningStore(), Path(folder) / "later.jsonl"  # (the others first) then the first one
        for path in paths[1:]:
            exchange.import_file(later, path)
        exchange.export_jsonl(later, first)
        assert merged([paths[0], first]) == expected
        for found in expected["decisions"]:
            local = [e for entries in files for e in entries if e[0] == found.m and e[2] == HERE]
            assert found.session_id == HERE or all(not last_of(e, files) for e in local)


def last_of(entry: tuple[int, float, str, str, bool], files: list[list[tuple[int, float, str, str, bool]]]) -> bool:
    """Whether an entry is what its file holds for its m."""
    return any([e for e in found if e[0] == entry[0]][-1:] == [entry] for found in files)


def test_a_file_cannot_say_where_a_session_of_ones_own_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.socket, "gethostname", lambda: HERE)
    own, other = TuningStore(), TuningStore()
    begin(own, "s1", host=HERE)
    mine = filled(own)
    begin(other, "s1", host="elsewhere")
    newer = measurement(median=1.0)
    other.add_measurement(newer)
    other.set_decision(decision(PROBLEM, newer, DAYS[2]))
    exchange.export_jsonl(other, tmp_path / "x.jsonl")
    exchange.import_file(own, tmp_path / "x.jsonl")
    kept = own.decision(CPU.key, PROBLEM)
    assert kept is not None and kept.decided_at == DAYS[2]  # of the same session, so as local: the later one
    begin(other, "s2", host="elsewhere")
    foreign = measurement(median=0.5, session="s2")
    other.add_measurement(foreign)
    other.set_decision(decision(PROBLEM, foreign, "2028-01-01T00:00:00+00:00"))
    exchange.export_jsonl(other, tmp_path / "y.jsonl")
    assert exchange.import_file(own, tmp_path / "y.jsonl").superseded == 0
    assert own.decision(CPU.key, PROBLEM) == kept != mine


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    exchange.export_jsonl(example(10.0, 11.0), path)
    target = TuningStore()
    filled(target, median=12.0)
    before = content(target)
    report = exchange.import_file(target, path, dry_run=True)
    assert content(target) == before
    assert report == exchange.import_file(target, path)
    assert report.added["measurements"] == 3 and content(target) != before


def test_ones_own_decisions_are_kept_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.socket, "gethostname", lambda: "mine")
    path = tmp_path / "x.jsonl"
    foreign = TuningStore()
    begin(foreign, "s2")
    faster = measurement(median=1.0, session="s2")
    foreign.add_measurement(faster)
    foreign.set_decision(decision(PROBLEM, faster))
    exchange.export_jsonl(foreign, path)
    own = TuningStore()
    begin(own, "s1", host="mine")
    mine = filled(own)
    report = exchange.import_file(own, path)
    assert own.decision(CPU.key, PROBLEM) == mine
    assert report.added["measurements"] == 1
    assert exchange.import_file(own, path, replace_decisions=True).superseded == 1
    found = own.decision(CPU.key, PROBLEM)
    assert found is not None
    assert found.leader == faster.id


def test_winners_only_leaves_out_what_no_decision_refers_to(tmp_path: Path) -> None:
    store, path = example(10.0, 11.0), tmp_path / "x.jsonl"
    exchange.export_jsonl(store, path, exchange.Filter(winners_only=True))
    target = TuningStore()
    assert exchange.import_file(target, path).rejected == []
    assert target.counts()["measurements"] == 2
    assert target.counts()["decisions"] == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".db"])
@pytest.mark.parametrize(
    ("chosen", "ms"),
    [
        (exchange.Filter(ms=(8, 24)), [8, 24]),
        (exchange.Filter(n=16, k=32, dtypes=("float32",), layouts=("kn",)), [8, 16, 24]),
        (exchange.Filter(n=17), []),
        (exchange.Filter(dtypes=("float16",)), []),
        (exchange.Filter(device_key="another"), []),
    ],
)
def test_an_export_holds_what_was_chosen_and_what_that_refers_to(
    tmp_path: Path, suffix: str, chosen: exchange.Filter, ms: list[int]
) -> None:
    source, path = example(10.0, 11.0, 12.0), tmp_path / f"x{suffix}"
    begin(source, "unused")
    write = exchange.export_jsonl if suffix == ".jsonl" else exchange.export_sqlite
    count = write(source, path, chosen)
    target = TuningStore()
    assert exchange.import_file(target, path).rejected == []
    found = content(target)
    assert [d.m for d in found["decisions"]] == ms
    assert {m.m for m in found["measurements"]} == set(ms)
    assert len(found["sessions"]) == len(found["devices"]) == bool(ms)
    assert count == sum(len(rows) for rows in found.values())


def test_a_file_of_json_lines_is_stable_and_leads_with_its_format(tmp_path: Path) -> None:
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    store = example(10.0, 11.0)
    exchange.export_jsonl(store, one)
    target = TuningStore()
    exchange.import_file(target, one)
    exchange.export_jsonl(target, two)
    assert one.read_bytes() == two.read_bytes()
    header = json.loads(one.read_text().splitlines()[0])
    assert header == {"format": "autodispatch-tuning", "schema": 3, "commands": ["c"]}


def test_an_export_while_another_connection_writes_is_whole_and_not_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    store = TuningStore(path)
    filled(store)
    assert store.journal_mode == "wal"
    copy = tmp_path / "copy.db"
    exchange.export_sqlite(store, copy)
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT count(*) FROM measurements").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() != ("wal",)
    assert not list(tmp_path.glob("*.part*"))


def lines(path: Path, *changes: dict[str, Any]) -> Path:
    """An export in which the measurement is changed; each change also drops the stored id's fit to its content."""
    store = TuningStore()
    filled(store)
    exchange.export_jsonl(store, path)
    text = path.read_text().splitlines()
    found = [json.loads(line) for line in text]
    for change in changes:
        for line in found:
            if line.get("record") == "measurement":
                line |= change
    path.write_text("\n".join(json.dumps(line) for line in found) + "\n")
    return path


@pytest.mark.parametrize(
    "change",
    [
        {"variant": '"); system("'},
        {"config": '{"tile_m": 7}'},
        {"config": "x" * 3000},
        {"median_us": -1.0},
        {"median_us": "fast"},
        {"status": "splendid"},
        {"options": "-I/ --include=x"},
        {"samples_us": [1.0] * 2000},
        {"median_us": 11.0},
        {"dtype": "float64"},
        {"relative_error": float("nan")},
    ],
    ids=lambda c: f"{next(iter(c))}={str(next(iter(c.values())))[:12]}",
)
def test_a_bad_record_is_rejected_with_its_reason_and_the_others_are_taken(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    store = TuningStore()
    report = exchange.import_file(store, lines(tmp_path / "x.jsonl", change))
    assert len(report.rejected) == 2  # the measurement, and the decision that refers to it
    assert store.counts()["measurements"] == 0
    assert store.counts()["sessions"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"m": 9}, "measured on another problem"),
        ({"finalists": []}, "its leader is not one of its finalists"),
        ({"session_id": "unknown"}, "its session or device is missing"),
    ],
)
def test_a_decision_that_does_not_fit_its_measurements_is_rejected(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = lines(tmp_path / "x.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found[-1] |= change
    path.write_text("\n".join(json.dumps(line) for line in found) + "\n")
    report = exchange.import_file(TuningStore(), path)
    assert len(report.rejected) == 1
    assert words in report.rejected[0]


def test_a_decision_for_a_failed_candidate_is_rejected(tmp_path: Path) -> None:
    store = TuningStore()
    begin(store)
    failed = measurement(status="wrong_result", median_us=None, p20_us=None, p80_us=None, mad_us=None, samples_us=[])
    store.add_measurement(failed)
    store.set_decision(decision(PROBLEM, failed))
    exchange.export_jsonl(store, tmp_path / "x.jsonl")
    report = exchange.import_file(TuningStore(), tmp_path / "x.jsonl")
    assert report.rejected == ["decision 8,16,32 float32 kn: a finalist was not measured on its device"]


def test_broken_lines_are_rejected_by_number(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl")
    with path.open("a") as file:
        file.write('{"record": "measurement"\n[1]\n{"record": "unheard of"}\n')
    report = exchange.import_file(TuningStore(), path)
    assert [r.split(":")[0] for r in report.rejected] == ["line 7", "line 8", "line 9"]


def test_files_that_are_no_export_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TuningStore()
    for name, text, words in (
        ("pickle", pickle.dumps({"a": 1}), "JSON Lines or SQLite"),
        ("other", b'{"format": "another"}\n', "must begin with a header"),
        ("newer", b'{"format": "autodispatch-tuning", "schema": 99}\n', "schema 3 or older"),
        ("empty header", b"[]\n", "must begin with a header"),
    ):
        path = tmp_path / name
        path.write_bytes(text)
        with pytest.raises(StoreError, match=words):
            exchange.import_file(store, path)
    with pytest.raises(StoreError, match="must be a file"):
        exchange.import_file(store, tmp_path / "absent")
    monkeypatch.setattr(exchange, "MAX_FILE_BYTES", 10)
    with pytest.raises(StoreError, match="at most 10 bytes"):
        exchange.import_file(store, lines(tmp_path / "large.jsonl"))
    assert sum(store.counts().values()) == 0


def test_numbers_and_depths_that_nobody_writes_are_rejected(tmp_path: Path) -> None:
    exchange.export_jsonl(example(10.0), tmp_path / "x.jsonl")
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    broken = [line.replace('"registers":null', f'"registers":{10**30}') for line in lines]
    (tmp_path / "x.jsonl").write_text("\n".join([*broken, "[" * 100_000]))
    report = exchange.import_file(TuningStore(), tmp_path / "x.jsonl")
    assert sum("registers" in reason for reason in report.rejected) == 2
    assert "not JSON" in report.rejected[-1]
    source = TuningStore(tmp_path / "x.db")
    filled(source)
    source.write(lambda db: db.execute("UPDATE measurements SET samples_us = ?", ("[" * 200_000,)))
    source.close()
    assert exchange.import_file(TuningStore(), tmp_path / "x.db").rejected


@pytest.mark.parametrize("suffix", [".jsonl", ".db"])
def test_what_cannot_be_read_does_not_keep_the_rest_from_being_exported(tmp_path: Path, suffix: str) -> None:
    source, path = example(10.0, 11.0), tmp_path / f"x{suffix}"
    source.write(lambda db: db.execute("UPDATE measurements SET status = 'odd' WHERE m = 8"))
    write = exchange.export_jsonl if suffix == ".jsonl" else exchange.export_sqlite
    write(source, path, exchange.Filter(n=16))
    target = TuningStore()
    assert exchange.import_file(target, path).rejected == []
    assert [d.m for d in target.all_of(DecisionRecord)] == [16]


def test_a_hostile_database_gives_nothing_but_rejections(tmp_path: Path) -> None:
    source = TuningStore(tmp_path / "source.db")
    filled(source)
    path = tmp_path / "hostile.db"
    exchange.export_sqlite(source, path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("ALTER TABLE measurements ADD COLUMN code TEXT")
        connection.execute("UPDATE measurements SET code = 'import os'")
        connection.execute("CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM devices; END")
    target = TuningStore()
    report = exchange.import_file(target, path)
    assert target.counts()["measurements"] == 0
    assert any("code" in r for r in report.rejected)


@pytest.mark.parametrize("path", SEEDS, ids=lambda p: p.stem)
def test_a_shipped_seed_loads_whole_and_is_named_by_its_device(path: Path) -> None:
    store = TuningStore()
    assert exchange.import_file(store, path).rejected == []
    (device,) = store.all_of(DeviceRecord)
    assert path.stem == device.key
    decisions = store.all_of(DecisionRecord)
    assert decisions
    stale = {m.variant for m in store.all_of(MeasurementRecord) if VARIANTS[m.variant].digest != m.digest}
    if stale:  # such records are misses, not errors
        warnings.warn(f"tune {path.name} again: {', '.join(sorted(stale))} changed since", stacklevel=1)


_NUMBERS = st.one_of(st.none(), st.floats(0, allow_nan=False, allow_infinity=False))
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.floats(0, 1e20), max_size=5), _NUMBERS, _TEXTS, _TEXTS)
@hypothesis.example([1e-5], 9.9e-05, "\x7f", "\x1f\u2028é")
@hypothesis.example([1e16, 1e15], 1e-4, '{"a":0.00001}', '\\"/')
@hypothesis.example([0.0001, 5e-324], 0.0, "", "")
def test_the_id_is_the_hash_of_the_standard_librarys_json(
    samples: list[float], number: float | None, config: str, reason: str
) -> None:
    record = measurement(samples_us=samples, relative_error=number, config=config, reason=reason)
    content = record.content()
    del content["id"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert record.id == content_hash(content) == hashlib.sha256(text.encode()).hexdigest()[:32]
