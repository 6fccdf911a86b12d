"""The compiler's refusals: architectures that this NVRTC does not know, kernel caches that cannot be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autodispatch import device as device_module
from autodispatch import settings as settings_module
from autodispatch.compiler import check_architecture, nvrtc_file
from autodispatch.device import import_cupy
from autodispatch.errors import CompileError
from tests.fakes import H200, like

SUPPORTED = [75, 80, 86, 87, 89, 90, 100, 120]


@pytest.mark.parametrize("capability", [(3, 0), (9, 9), (13, 0)])
def test_an_unknown_architecture_names_the_card_the_nvrtc_and_its_file(capability: tuple[int, int]) -> None:
    card = like(H200, name="Unheard-of 9000", compute_capability=capability)
    with pytest.raises(CompileError) as error:
        check_architecture(card, SUPPORTED)
    text = str(error.value)
    assert "Unheard-of 9000" in text
    assert f"got {capability[0]}.{capability[1]}" in text
    assert "NVRTC 13.0" in text
    assert nvrtc_file() in text
    assert "7.5, 8.0" in text


def test_known_architectures_pass() -> None:
    check_architecture(H200, SUPPORTED)


def test_the_loaded_nvrtc_is_named_by_its_path() -> None:
    assert "nvrtc" in nvrtc_file()


def test_an_unwritable_kernel_cache_is_replaced_by_memory_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings_logged: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way of a folder")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(blocked / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    (tmp_path / "cupy.py").write_text("name = 'a CuPy for this test'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    device_module._check_kernel_cache.cache_clear()
    import_cupy()
    import_cupy()
    monkeypatch.delitem(sys.modules, "cupy")
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"
    assert Path(os.environ["CUPY_CACHE_DIR"]).is_dir()
    assert [r.getMessage().startswith("the kernel cache") for r in warnings_logged.records] == [True]
    device_module._check_kernel_cache.cache_clear()
    assert settings_module.kernel_cache() == Path(os.environ["CUPY_CACHE_DIR"])
