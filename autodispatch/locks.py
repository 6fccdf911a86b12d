"""Locks between processes: one creates a database, one times on a GPU."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("autodispatch")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock file; without one where the system has no flock. The system gives it back when the process ends."""
    with path.open("w") as file:
        if fcntl is not None and not _taken_at_once(file):
            _log.info("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def timing_on(uuid: str) -> Iterator[None]:
    """Only one process of this host times on the GPU of this UUID. An empty one, as the CPU has, locks nothing."""
    if not uuid:
        yield
        return
    folder = Path(tempfile.gettempdir()) / "autodispatch-locks"
    folder.mkdir(exist_ok=True)
    path = folder / f"{uuid}.lock"
    with contextlib.suppress(OSError):  # that other users made and opened to all
        folder.chmod(0o1777)
        path.touch()
        path.chmod(0o666)
    with exclusive(path):
        yield


def _taken_at_once(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
