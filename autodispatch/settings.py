"""Settings: everything that the environment may say. No other module reads environment variables."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = ("cache", "tune", "background", "force", "off")
EFFORTS = ("quick", "full")
_HANDLER = "autodispatch to standard error"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Settings:
    """How a process dispatches and tunes.

    Attributes:
        database: the user's tuning database, read and written.
        read_only_databases: databases consulted after it, in order, never written.
        mode: what a call may do about a problem that no decision serves, for a near m either: `cache` never tunes,
            `tune` tunes at the first miss, `background` tunes beside the calls and then serves what won, `force` tunes
            every problem once per process whatever is stored, `off` ignores the store.
        effort: how much such a tuning tries, `quick` or `full`.
        record_misses: write each problem that was not found into the user's database, once per process.
        pin: the variant that serves every call that names no candidate.
        strict: refuse a problem for which nothing near was tuned, with NotTunedError.
        log: the least level of log lines that are written to standard error, `debug`, `info`, `warning` or `error`;
            by default the program's own logging decides.
        reload_s: seconds after which a process looks whether another one changed a database; 0 never looks.
    """

    database: Path
    read_only_databases: tuple[Path, ...] = ()
    mode: str = "cache"
    effort: str = "quick"
    record_misses: bool = False
    pin: str | None = None
    strict: bool = False
    log: str | None = None
    reload_s: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)} (got {self.mode!r})")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)} (got {self.effort!r})")
        if self.log is not None and self.log not in LOG_LEVELS:
            raise ValueError(f"log must be one of {', '.join(LOG_LEVELS)} (got {self.log!r})")
        if not (math.isfinite(self.reload_s) and self.reload_s >= 0):
            raise ValueError(f"reload_s must be a number of seconds, or 0 (got {self.reload_s!r})")

    def start_log(self) -> None:
        """Writes log lines to standard error from the level on that `log` names."""
        if self.log is None:
            return
        logger = logging.getLogger("autodispatch")
        logger.setLevel(self.log.upper())
        if not any(h.name == _HANDLER for h in logger.handlers):
            handler = logging.StreamHandler()
            handler.name = _HANDLER
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
            logger.addHandler(handler)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads the settings; an empty variable counts as unset. Raises ValueError that names a bad variable."""
        env = os.environ if environment is None else environment
        database = env.get("AUTODISPATCH_DB")
        return cls(
            database=Path(database) if database else default_database(env),
            read_only_databases=tuple(Path(p) for p in env.get("AUTODISPATCH_DB_PATH", "").split(os.pathsep) if p),
            mode=_choice(env, "AUTODISPATCH_MODE", MODES, "cache"),
            effort=_choice(env, "AUTODISPATCH_EFFORT", EFFORTS, "quick"),
            record_misses=_choice(env, "AUTODISPATCH_RECORD_MISSES", ("0", "1"), "0") == "1",
            pin=env.get("AUTODISPATCH_PIN") or None,
            strict=_choice(env, "AUTODISPATCH_STRICT", ("0", "1"), "0") == "1",
            log=_choice(env, "AUTODISPATCH_LOG", LOG_LEVELS, "") or None,
            reload_s=_seconds(env, "AUTODISPATCH_RELOAD_S", "1"),
        )


def default_database(env: Mapping[str, str]) -> Path:
    """tuning.db in the user's cache folder, or in the temporary folder where there is no home."""
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]) / "autodispatch" / "tuning.db"
    if env.get("LOCALAPPDATA"):
        return Path(env["LOCALAPPDATA"]) / "autodispatch" / "tuning.db"
    if env.get("HOME"):
        return Path(env["HOME"]) / ".cache" / "autodispatch" / "tuning.db"
    return Path(tempfile.gettempdir()) / "autodispatch" / "tuning.db"


def kernel_cache(env: Mapping[str, str] | None = None) -> Path:
    """The folder where CuPy keeps compiled kernels."""
    env = os.environ if env is None else env
    return Path(env.get("CUPY_CACHE_DIR") or Path(env.get("HOME") or tempfile.gettempdir()) / ".cupy" / "kernel_cache")


def keep_kernels_in_memory() -> None:
    """Tells CuPy not to use its kernel cache on disk, for the rest of this process.

    CuPy still wants a folder that exists when it is imported.
    """
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    os.environ["CUPY_CACHE_DIR"] = tempfile.gettempdir()


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = env.get(name) or default
    if value not in (*allowed, default):
        raise ValueError(f"{name} must be one of {', '.join(allowed)} (got {value!r})")
    return value


def _seconds(env: Mapping[str, str], name: str, default: str) -> float:
    value = env.get(name) or default
    try:
        return float(value)
    except ValueError as cause:
        raise ValueError(f"{name} must be a number of seconds (got {value!r})") from cause
