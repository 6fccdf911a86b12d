"""Imports run one way, importing is light, and only public names of CuPy are used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autodispatch

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "autodispatch").rglob("*.py"))


def test_the_layers_hold() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


def test_the_dispatcher_imports_neither_tuner_nor_benchmark_at_its_top() -> None:
    anywhere = set()
    for name in ("dispatcher", "quick", "planning"):
        tree = ast.parse((ROOT / "autodispatch" / f"{name}.py").read_text())
        top = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
        assert not top & {"autodispatch.tuner", "autodispatch.benchmark"}
        anywhere |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {"autodispatch.tuner", "autodispatch.benchmark"} <= anywhere


def test_importing_is_light(tmp_path: Path) -> None:
    script = """
import sys
import autodispatch
heavy = {"cupy", "numpy", "pydantic", "sqlite_utils", "sqlite3", "typer", "rich", "torch", "pynvml", "cuda"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from autodispatch import dispatcher
assert not {"cupy", "torch", "pynvml", "cuda", "typer", "autodispatch.tuner"} & set(sys.modules)
"""
    env = {**os.environ, "AUTODISPATCH_DB": str(tmp_path / "tuning.db")}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


def test_only_public_names_of_cupy_are_used() -> None:
    for path in SOURCES:
        found = re.search(r"cupy\._[a-z]\w*|cupy_backends", path.read_text())
        assert found is None, f"{path.name}: {found}"


def test_the_environment_is_read_in_one_place() -> None:
    for path in SOURCES:
        if path.name != "settings.py":
            assert not re.search(r"os\.(environ|getenv)", path.read_text()), path.name


def test_no_module_is_called_utils_and_none_is_very_long() -> None:
    for path in SOURCES:
        assert path.stem not in ("utils", "common", "helpers")
        assert len(path.read_text().splitlines()) <= 420, path.name


def test_every_public_name_exists_and_others_are_refused() -> None:
    for name in autodispatch.__all__:
        assert getattr(autodispatch, name) is not None
    assert dir(autodispatch) == autodispatch.__all__
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = autodispatch.missing
