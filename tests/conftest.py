"""Fixtures for all tests. No test reads the user's environment, database or kernel cache."""

from __future__ import annotations

import os

# tests run side by side; threads of BLAS that wait for each other would only stand in the way
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodispatch import resources
from autodispatch.dispatcher import Dispatcher
from autodispatch.settings import Settings
from autodispatch.store import TuningStore


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="try every N-th config only, under a slow tool such as memcheck",
    )
    parser.addoption(
        "--all-builds",
        action="store_true",
        help="build every config for every architecture, which takes a quarter of an hour, and not only a share",
    )


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DB_PATH", "MODE", "EFFORT", "RECORD_MISSES", "PIN", "STRICT", "LOG", "RELOAD_S"):
        monkeypatch.delenv(f"AUTODISPATCH_{name}", raising=False)
    monkeypatch.setenv("AUTODISPATCH_DB", str(tmp_path / "tuning.db"))
    monkeypatch.setattr(resources, "seeds", list)  # what is shipped must not decide a test


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "tuning.db")


@pytest.fixture
def dispatcher(settings: Settings) -> Iterator[Dispatcher]:
    d = Dispatcher(settings)
    yield d
    d.close()


@pytest.fixture
def store() -> Iterator[TuningStore]:
    s = TuningStore()
    yield s
    s.close()


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="autodispatch")
    return caplog
