"""Where the kernels and the shipped tuning records are, in a wheel and in an editable install alike."""

from __future__ import annotations

import importlib
from pathlib import Path


def _folder(package: str) -> Path:
    module = importlib.import_module(package)
    return Path(module.__path__[0]).resolve()


def kernels() -> Path:
    """The folder of the `.cu` files; headers lie below `include/autodispatch`."""
    return _folder("autodispatch.kernels")


def seeds() -> list[Path]:
    """The shipped tuning records, one JSON Lines file per device model."""
    return sorted((_folder("autodispatch.tuning_db") / "seed").glob("*.jsonl"))


def datasette() -> Path:
    """The description of a tuning database for Datasette."""
    return _folder("autodispatch.tuning_db") / "datasette.json"


def schema() -> Path:
    """The database schema as SQL, for reading."""
    return _folder("autodispatch.tuning_db") / "schema.sql"
