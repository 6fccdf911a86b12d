"""Paths and URLs of what is exported and imported."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from autodispatch.cli import app
from autodispatch.errors import StoreError
from autodispatch.exchange import export_jsonl
from autodispatch.locations import name_of, readable, writable
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from tests.stored import CPU, PROBLEM, filled


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    system = fsspec.filesystem("memory")
    system.store.clear()
    return system


@pytest.mark.parametrize("name", ["tuned.jsonl", "tuned.db"])
def test_records_travel_by_url(tmp_path: Path, memory: fsspec.AbstractFileSystem, name: str) -> None:
    made = filled(TuningStore(Settings.from_environment().database))
    runner, url = CliRunner(), f"memory://bucket/{name}"
    assert "records written to memory://bucket/" in runner.invoke(app, ["export", url]).output
    other = tmp_path / "other.db"
    assert "1 decisions" in runner.invoke(app, ["import", url, "--database", str(other)]).output
    assert TuningStore(other).decision(CPU.key, PROBLEM) == made


def test_a_file_that_is_not_whole_does_not_leave(memory: fsspec.AbstractFileSystem) -> None:
    def interrupted() -> None:
        with writable("memory://bucket/x.jsonl") as path:
            path.write_text("half of it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not memory.exists("/bucket/x.jsonl")


def test_an_upload_that_fails_is_an_error_of_the_store(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("access denied")

    def upload() -> None:
        with writable("memory://bucket/x.jsonl") as path:
            path.write_text("all of it")

    monkeypatch.setattr(type(memory), "put_file", fail)
    with pytest.raises(StoreError, match="access denied"):
        upload()


def test_what_is_too_large_is_not_read_to_its_end(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe("/bucket/large", b"x" * 3000)
    with pytest.raises(StoreError, match="at most 2000 bytes"), readable("memory://bucket/large", 2000):
        pass


def test_what_cannot_be_reached_and_a_package_that_is_not_there_are_errors_of_the_store(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="could not be reached"), readable("memory://bucket/absent", 10):
        pass
    with pytest.raises(StoreError, match="could not be reached"), readable("gopher://bucket/x", 10):
        pass
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"install autodispatch\[remote\]"), readable("memory://bucket/x", 10):
        pass


def test_paths_need_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with writable(str(tmp_path / "x.jsonl")) as path:
        export_jsonl(TuningStore(), path)
    with readable(str(tmp_path / "x.jsonl"), 1) as path:
        assert path == tmp_path / "x.jsonl"


def test_the_name_of_a_url_is_its_last_part() -> None:
    assert name_of("https://host/a/b.jsonl?token=1") == "b.jsonl"
    assert name_of("s3://bucket/x.db") == "x.db"
    assert name_of("/tmp/a/b.db") == "b.db"
