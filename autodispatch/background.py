"""Threads beside the calls: one tunes what calls missed, one looks whether a database was written by others."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from autodispatch.device import DeviceInfo
from autodispatch.driver import relax_capture_mode
from autodispatch.runner import Runner

_log = logging.getLogger("autodispatch")
_IDLE_S = 10.0  # after which the worker processes are given up


class Reloading(Protocol):
    def reload_if_changed(self) -> None: ...


class Background:
    """A thread that tunes one problem after the other, each device's candidates in a process of their own; both end
    when nothing is left to tune."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Callable[[Runner], None], DeviceInfo]] = queue.Queue()
        self._runners: dict[str, Runner] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[Runner], None], device: DeviceInfo) -> None:
        with self._lock:
            self._waiting.put((work, device))
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._work, name="autodispatch-tune", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for runner in self._runners.values():
                runner.close()

    def _work(self) -> None:
        _stay_out_of_captures()
        while True:
            try:
                work, device = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._end()
                        return
                continue
            runner = self._runner(device)
            if runner is None:
                return
            try:
                work(runner)
            except Exception as cause:
                if not self._is_closed:
                    _log.warning("tuning in the background: %s", cause)
            del work

    def _runner(self, device: DeviceInfo) -> Runner | None:
        """None once all is closed."""
        from autodispatch.worker import runner_for

        name = f"{device.kind}:{device.index}"
        with self._lock:
            if self._is_closed:
                return None
            if name not in self._runners:
                self._runners[name] = runner_for(device)
            return self._runners[name]

    def _end(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._thread = None


def look_again(planner: weakref.ref[Reloading], closed: threading.Event, every_s: float) -> None:
    """Until the planner is closed, or gone."""
    _stay_out_of_captures()
    while not closed.wait(every_s):
        found = planner()
        if found is None:
            return
        try:
            found.reload_if_changed()
        except Exception as cause:  # a database that comes and goes must not end the looking
            _log.debug("no reload: %s", cause)
        del found


def _stay_out_of_captures() -> None:
    with contextlib.suppress(OSError, AttributeError):  # without a driver there is nothing to capture
        relax_capture_mode()
