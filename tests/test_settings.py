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
            "AUTODISPATCH_PIN": "cpu_split",
            "AUTODISPATCH_STRICT": "1",
            "AUTODISPATCH_LOG": "debug",
            "AUTODISPATCH_RELOAD_S": "2.5",
        }
    )
    paths = (Path("/x/t.db"), (Path("/y/a.db"), Path("/y/b.db")))
    assert settings == Settings(*paths, "tune", "full", True, "cpu_split", True, "debug", 2.5)


CHOICES = [f"AUTODISPATCH_{x}" for x in ("MODE", "EFFORT", "RECORD_MISSES", "STRICT", "LOG")]


@pytest.mark.parametrize("name", CHOICES)
def test_a_bad_value_names_the_variable(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be one of .* \\(got 'sometimes'\\)"):
        Settings.from_environment({name: "sometimes"})


@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_the_seconds_of_a_reload_must_be_a_number(value: str) -> None:
    with pytest.raises(ValueError, match=r"(RELOAD_S|reload_s) must be a number of seconds"):
        Settings.from_environment({"AUTODISPATCH_RELOAD_S": value})


def test_without_a_home_the_temporary_folder_serves() -> None:
    assert Settings.from_environment({}).database.name == "tuning.db"
    assert kernel_cache({}).name == "kernel_cache"
    assert kernel_cache({"CUPY_CACHE_DIR": "/k"}) == Path("/k")
    assert Settings.from_environment({"XDG_CACHE_HOME": "/c"}).database == Path("/c/autodispatch/tuning.db")
