"""Layers: the databases in which a look-up searches, first hit first.

A store that cannot be used never stops a computation: the layers fall back to memory and say so once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from autodispatch.errors import StoreError
from autodispatch.store import TuningStore

_log = logging.getLogger("autodispatch")


class Layers:
    """The databases that a look-up searches, first hit first: the user's own, read-only ones, what is shipped."""

    def __init__(self, layers: Sequence[tuple[str, TuningStore]]) -> None:
        if not layers:
            raise StoreError("layers must hold at least one store (got none)")
        self.layers = list(layers)

    @property
    def user(self) -> TuningStore:
        return self.layers[0][1]

    def __iter__(self) -> Iterator[tuple[str, TuningStore]]:
        return iter(self.layers)

    @classmethod
    def open(cls, database: Path, read_only: Sequence[Path] = (), shipped: TuningStore | None = None) -> Layers:
        """Opens what can be opened. What cannot is left out with one warning; the user's own is then kept in memory."""
        try:
            layers = [("user", TuningStore(database))]
        except StoreError as cause:
            _log.warning("%s; tuning is kept in memory only", cause)
            layers = [("memory", TuningStore())]
        for path in read_only:
            try:
                layers.append((str(path), TuningStore(path, read_only=True)))
            except StoreError as cause:
                _log.warning("%s; it is left out", cause)
        if shipped is not None:
            layers.append(("shipped", shipped))
        return cls(layers)

    def close(self) -> None:
        for _, store in self.layers:
            store.close()
