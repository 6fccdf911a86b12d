"""Settings are read from the environment, in one place, and a bad one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodispatch.settings import Settings, kernel_cache


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = Settings.from_environment({"HOME": "/home/u"})
    assert settings == Settings(Path("/home/u/.cache/autodispatch/tuning.db"))
    assert (settings.mode, settings.effort, settings.record_misses) == ("cache", "quick", False)


def test_every_variable_is_read() -> None:
    settings = Settings.from_environment(
        {
            "AUTODISPATCH_DB": "/x/t.db",
            "AUTODISPATCH_DB_PATH": "/y/a.db:/y/b.db",
            "AUTODISPATCH_MODE": "tune",
            "AUTODISPATCH_EFFORT": "full",
            "AUTODISPATCH_RECORD_MISSES": "1",
        }
    )
    assert settings == Settings(Path("/x/t.db"), (Path("/y/a.db"), Path("/y/b.db")), "tune", "full", True)


@pytest.mark.parametrize("name", ["AUTODISPATCH_MODE", "AUTODISPATCH_EFFORT", "AUTODISPATCH_RECORD_MISSES"])
def test_a_bad_value_names_the_variable(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .* \\(got 'sometimes'\\)"):
        Settings.from_environment({name: "sometimes"})


def test_without_a_home_the_temporary_folder_serves() -> None:
    assert Settings.from_environment({}).database.name == "tuning.db"
    assert kernel_cache({}).name == "kernel_cache"
    assert kernel_cache({"CUPY_CACHE_DIR": "/k"}) == Path("/k")
    assert Settings.from_environment({"XDG_CACHE_HOME": "/c"}).database == Path("/c/autodispatch/tuning.db")
