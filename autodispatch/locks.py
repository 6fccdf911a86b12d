"""Locks between processes: one creates a database, one times on a GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("autodispatch")


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds a lock file, which is never written and may belong to another user. The system gives it back when the
    process ends. Where there is no flock, or the file cannot be had, a warning is all there is.
    """
    try:
        fd = _open(path)
    except OSError as cause:
        _log.warning("%s cannot be locked (%s); going on without", path, cause)
        yield
        return
    try:
        if fcntl is not None and not _taken_at_once(fd):
            _log.info("waiting for another process that holds %s", path)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def timing_on(uuid: str) -> Iterator[None]:
    """Only one process of this host times on the GPU of this UUID. An empty one, as the CPU has, locks nothing."""
    if not uuid:
        yield
        return
    folder = Path(tempfile.gettempdir()) / "autodispatch-locks"
    with contextlib.suppress(OSError):  # it is there, or exclusive() will say what is wrong
        folder.mkdir()
        folder.chmod(0o1777)
    with exclusive(folder / f"{uuid}.lock"):
        yield


def _open(path: Path) -> int:
    """The lock file for reading, made for all users if it is not there. A link is refused."""
    follow = getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | follow, 0o644)
    except FileExistsError:
        return os.open(path, os.O_RDONLY | follow)
    return fd


def _taken_at_once(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as cause:  # a file system without locks
        _log.warning("there are no locks here (%s); going on without", cause)
    return True
