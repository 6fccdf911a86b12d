"""A process in which candidates are tried: what crashes, hangs or ruins the device there costs one candidate.

`main` serves requests on an inherited socket; WorkerRunner starts the process and replaces it when it is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from autodispatch.benchmark import workbench
from autodispatch.device import DeviceInfo, cpu_device, cuda_device
from autodispatch.errors import AutodispatchError, DeviceError
from autodispatch.problem import Problem
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner, Outcome, Runner
from autodispatch.variants import Candidate, Registry

_log = logging.getLogger("autodispatch")
LOAD_LIMIT_S = 300.0  # the inputs and the reference of a problem, the start of the process included
BUILD_LIMIT_S = 120.0  # a candidate's kernels
RUN_LIMIT_S = 60.0  # its check and timing, or the rounds of the finals for each finalist
_GRACE_S = 2.0
_START = "import sys; from autodispatch.worker import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class _Failed:
    """An exception of the worker, on its way to the process that asked."""

    error: BaseException


class WorkerGoneError(AutodispatchError):
    """The worker crashed, or did not answer in time and was killed; `status` is that of the candidate it had."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def runner_for(device: DeviceInfo, isolate: bool = True) -> Runner:
    """A runner in a process of its own, or in this one, also where the system cannot hand a socket on (Windows)."""
    return WorkerRunner(device) if isolate and os.name == "posix" else LocalRunner(workbench(device))


def local_runner(kind: str, index: int | None) -> tuple[LocalRunner, Registry]:
    """What a worker serves: the runner of a device, and the variants that it knows."""
    device = cpu_device() if kind == "cpu" else cuda_device(index or 0)
    return LocalRunner(workbench(device)), Registry()


class WorkerRunner(Runner):
    """Tries candidates in a worker process, which is killed when a limit is over and started anew when it is gone."""

    def __init__(
        self,
        device: DeviceInfo,
        factory: str = "autodispatch.worker:local_runner",
        *,
        load_limit_s: float = LOAD_LIMIT_S,
        build_limit_s: float = BUILD_LIMIT_S,
        run_limit_s: float = RUN_LIMIT_S,
    ) -> None:
        self.device = device
        self.regime = "eager-cold" if device.kind == "cpu" else "graph-cold"
        self._factory = factory
        self._limits = (load_limit_s, build_limit_s, run_limit_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._problem: Problem | None = None
        self._builds_ahead = True

    def require(self) -> None:
        self._ask("require", limit_s=self._limits[0])

    def load(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        self._problem, self._builds_ahead = problem, True
        self._ask("load", problem, [c.key for c in candidates], limit_s=self._limits[0])

    def screen(self, candidate: Candidate, best_us: float | None) -> Outcome:
        try:
            return self._screen(candidate, best_us)
        except WorkerGoneError as gone:
            if gone.status == "crashed" and self._builds_ahead:
                # it may have been another candidate's build; from now on there is one at a time
                self._builds_ahead = False
                return self.screen(candidate, best_us)
            return Outcome(Check(gone.status, str(gone)))
        except DeviceError as cause:
            self._end()
            return Outcome(Check("launch_failed", str(cause)))

    def _screen(self, candidate: Candidate, best_us: float | None) -> Outcome:
        self._ensure_loaded()
        self._ask("build", candidate.key, limit_s=self._limits[1])
        outcome: Outcome = self._ask("screen", candidate.key, best_us, limit_s=self._limits[2])
        return outcome

    def finals(self, candidates: Sequence[Candidate], rounds: int) -> list[Outcome]:
        limit_s = self._limits[1] + self._limits[2] * len(candidates)
        try:
            self._ensure_loaded()
            outcomes: list[Outcome] = self._ask("finals", [c.key for c in candidates], rounds, limit_s=limit_s)
        except DeviceError:
            self._end()
            raise
        return outcomes

    def unload(self) -> None:
        self._problem = None
        if self._process is not None:
            with contextlib.suppress(WorkerGoneError):
                self._ask("unload", limit_s=self._limits[0])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()  # the worker ends when nobody is there to ask
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        self._end()

    def _ensure_loaded(self) -> None:
        """After a worker is gone, another one takes up the problem."""
        if self._process is None and self._problem is not None:
            self._builds_ahead = False
            self._ask("load", self._problem, [], limit_s=self._limits[0])

    def _ask(self, request: str, *arguments: Any, limit_s: float) -> Any:
        """The worker's answer. Raises its exception, or WorkerGoneError when it has none in time."""
        connection = self._connected()
        try:
            connection.send((request, arguments))
            answer = (
                connection.recv()
                if connection.poll(limit_s)
                else WorkerGoneError("timeout", f"{request}: over {limit_s:g} s")
            )
        except (EOFError, OSError):
            answer = WorkerGoneError("crashed", f"{request}: the worker ended with {self._exit()}")
        except BaseException:  # interrupted: what it works on is of no use to anybody
            self._end()
            raise
        if isinstance(answer, WorkerGoneError):
            self._end()
            _log.warning("%s; another one is started", answer)
            raise answer
        if isinstance(answer, _Failed):
            raise answer.error
        return answer

    def _connected(self) -> Connection:
        if self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                arguments = [str(theirs.fileno()), self._factory, self.device.kind, str(self.device.index or 0)]
                command = [sys.executable, "-c", _START, *arguments]
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
            self._connection = Connection(ours.detach())
        return self._connection

    def _exit(self) -> str:
        """How the worker ended, in words."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_GRACE_S)
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "a closed connection"

    def _end(self) -> None:
        """Kills the worker with all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def serve(connection: Connection, runner: LocalRunner, registry: Registry) -> None:
    """Answers requests until the other side is gone."""

    def candidates(keys: Sequence[tuple[str, str]]) -> list[Candidate]:
        return [registry.parse(*key) for key in keys]

    requests: dict[str, Callable[..., Any]] = {
        "require": runner.require,
        "load": lambda problem, keys: runner.load(problem, candidates(keys)),
        "build": lambda key: _await_build(runner, registry.parse(*key)),
        "screen": lambda key, best_us: runner.screen(registry.parse(*key), best_us),
        "finals": lambda keys, rounds: runner.finals(candidates(keys), rounds),
        "unload": runner.unload,
    }
    while True:
        try:
            request, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = requests[request](*arguments)
        except Exception as cause:
            answer = _Failed(_portable(cause))
        connection.send(answer)


def _await_build(runner: LocalRunner, candidate: Candidate) -> None:
    with contextlib.suppress(AutodispatchError):  # the screening tells it
        runner.build(candidate)


def _portable(error: Exception) -> Exception:
    """The error as another process can have it."""
    if isinstance(error, MemoryError):
        return MemoryError(str(error))
    if isinstance(error, DeviceError):
        return DeviceError(str(error))
    return AutodispatchError(
        f"{type(error).__name__}: {error}" if not isinstance(error, AutodispatchError) else str(error)
    )


def main(arguments: Sequence[str]) -> None:
    fd, factory, kind, index = arguments
    module, name = factory.split(":")
    with Connection(int(fd)) as connection:
        serve(connection, *getattr(importlib.import_module(module), name)(kind, int(index)))
