"""The documentation names every command, option, setting and public name, and nothing that does not exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

import autodispatch
from autodispatch import cli
from autodispatch.selection import Origin
from autodispatch.settings import Settings
from autodispatch.variants import VARIANTS

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tuning_db").glob("*.md")])
COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]


def test_every_command_and_option_is_in_the_reference() -> None:
    for name, command in COMMANDS.items():
        assert f"`autodispatch {name}`" in REFERENCE, name
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--") and option != "--help":
                    assert f"`{option}`" in REFERENCE, f"{name} {option}"


def test_every_option_of_the_reference_exists() -> None:
    options = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
    assert set(re.findall(r"`(--[a-z-]+)`", REFERENCE)) <= options | {"--help"}


def test_commands_in_every_page_can_be_parsed() -> None:
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                words = line.split("#")[0].split()
                if words[:1] != ["autodispatch"]:
                    continue
                command = COMMANDS[words[1]]
                given = {w for w in words[2:] if w.startswith("--")}
                assert given <= {o for p in command.params for o in p.opts}, f"{page.name}: {line}"


def test_every_setting_is_in_the_reference_and_no_other() -> None:
    source = (ROOT / "autodispatch" / "settings.py").read_text()
    variables = set(re.findall(r"AUTODISPATCH_[A-Z_]+", source))
    assert set(re.findall(r"AUTODISPATCH_[A-Z_]+", REFERENCE)) == variables
    for field in fields(Settings):
        assert f"`{field.name}`" in REFERENCE


def test_every_public_name_is_in_the_reference() -> None:
    for name in autodispatch.__all__:
        assert re.search(rf"`{name}[`(]", REFERENCE), name
    for origin in Origin:
        assert f"`{origin.value}`" in REFERENCE


def test_every_variant_is_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for name in VARIANTS:
        assert f"`{name}`" in glossary


def test_the_module_list_of_the_design_is_that_of_the_package() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    listed = set(re.findall(r"^  (\w+)\.py ", design, re.MULTILINE))
    modules = {p.stem for p in (ROOT / "autodispatch").glob("*.py")} - {"__init__", "__main__"}
    assert listed == modules


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_python_of_the_tutorial_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "64,2048,512 float32 kn" in result.stdout


@pytest.mark.parametrize("name", ["background", "metrics"])
def test_the_examples_that_need_no_gpu_run(tmp_path: Path, name: str) -> None:
    if name == "metrics":
        pytest.importorskip("prometheus_client")
    script = [sys.executable, str(ROOT / "docs" / "examples" / f"{name}.py")]
    env = {**os.environ, "AUTODISPATCH_DB": str(tmp_path / "t.db")}
    result = subprocess.run(script, capture_output=True, text=True, check=False, env=env, timeout=180)
    assert result.returncode == 0, result.stderr
    expected = {"background": "tuned: measured", "metrics": 'autodispatch_calls_total{origin="heuristic"} 1.0'}
    assert expected[name] in result.stdout


def test_every_example_is_on_the_page_about_serving() -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    for path in (ROOT / "docs" / "examples").glob("*.py"):
        assert f"(examples/{path.name})" in page
