"""Files by path or URL: what is read is a local file meanwhile, what is written leaves when it is whole.

URLs (`s3://`, `gs://`, `https://`, ...) go through fsspec, which the extra `remote` brings; paths need nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from autodispatch.errors import StoreError

_CHUNK_BYTES = 1 << 20


@contextmanager
def readable(location: str, max_bytes: int) -> Iterator[Path]:
    """The file at a path, or a copy of what a URL holds. Raises StoreError, also for more than `max_bytes`."""
    if not _is_url(location):
        yield Path(location)
        return
    system, path = _reached(location)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / name_of(location)
        with _reaching(location), system.open(path, "rb") as source, copy.open("wb") as target:
            copied = 0
            while chunk := source.read(_CHUNK_BYTES):
                copied += len(chunk)
                if copied > max_bytes:
                    raise StoreError(f"{location} must have at most {max_bytes} bytes (got more)")
                target.write(chunk)
        yield copy


@contextmanager
def writable(location: str) -> Iterator[Path]:
    """Where to write for a path, or for a URL, to which the file goes when the block has ended well."""
    if not _is_url(location):
        yield Path(location)
        return
    system, path = _reached(location)
    with TemporaryDirectory() as folder:
        draft = Path(folder) / name_of(location)
        yield draft
        with _reaching(location):
            system.put_file(str(draft), path)


def name_of(location: str) -> str:
    """The last part of a path or URL."""
    path = location.partition("://")[2].partition("?")[0] if _is_url(location) else location
    return PurePosixPath(path).name or "file"


def _is_url(location: str) -> bool:
    return "://" in location


def _reached(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there."""
    try:
        import fsspec
    except ImportError as cause:
        raise StoreError(f"{location} needs the package fsspec; install autodispatch[remote]") from cause
    with _reaching(location):
        system, path = fsspec.url_to_fs(location)
    return system, str(path)


@contextmanager
def _reaching(location: str) -> Iterator[None]:
    """File systems raise errors of any kind."""
    try:
        yield
    except StoreError:
        raise
    except Exception as cause:
        raise StoreError(f"{location} could not be reached ({type(cause).__name__}: {cause})") from cause
