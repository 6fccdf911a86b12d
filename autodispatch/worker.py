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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from autodispatch.benchmark import regime, workbench
from autodispatch.device import DeviceInfo, cpu_device, cuda_device
from autodispatch.errors import AutodispatchError, DeviceError
from autodispatch.heuristics import predict
from autodispatch.problem import Problem
from autodispatch.reference import Check
from autodispatch.runner import LocalRunner, Outcome, Runner
from autodispatch.variants import Candidate, Registry

_log = logging.getLogger("autodispatch")
LOAD_LIMIT_S = 300.0  # the inputs and the reference of a problem, the start of the process included
BUILD_LIMIT_S = 120.0  # a candidate's kernels
RUN_LIMIT_S = 60.0  # its check and timing, or the rounds of the finals for each finalist
_GRACE_S = 2.0
_PREDICTED_LAUNCHES = 300  # of a candidate's check, timing or finals, with room for a model that is far off
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
        self.regime = regime(device)
        self._factory = factory
        self._limits = (load_limit_s, build_limit_s, run_limit_s)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._problem: Problem | None = None
        self._builds_ahead = True
        self._closed = False

    def require(self) -> None:
        self._ask("require", limit_s=self._limits[0])

    def load(self, problem: Problem, candidates: Sequence[Candidate]) -> int:
        self._problem, self._builds_ahead = problem, True
        foreign_load: int = self._ask("load", problem, [c.key for c in candidates], limit_s=self._limits[0])
        return foreign_load

    def screen(self, candidate: Candidate, best_us: float | None, deadline: float | None = None) -> Outcome:
        self._ensure_loaded()
        request, start = "build", time.monotonic()
        try:
            self._ask("build", candidate.key, limit_s=self._limits[1])
            request, built = "screen", time.monotonic()
            limit_s = self._run_limit_s([candidate])
            outcome: Outcome = self._ask("screen", candidate.key, best_us, deadline, limit_s=limit_s)
        except WorkerGoneError as gone:
            if self._builds_ahead and (request == "build" or gone.status == "crashed"):
                # it may have been another candidate's build; from now on there is one at a time
                return self.screen(candidate, best_us, deadline)
            return Outcome(Check(gone.status, str(gone)))
        except DeviceError as cause:
            self._end()
            return Outcome(Check("launch_failed", str(cause)))
        return replace(outcome, spent=outcome.spent._replace(building=built - start))

    def finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None = None) -> list[Outcome]:
        try:
            return self._finals(candidates, rounds, deadline)
        except AutodispatchError as cause:
            if self._closed:
                raise
            failed = self._ruinous(candidates, rounds)
            _log.warning("%s; the finals are played again without %s", cause, ", ".join(map(str, failed)) or "change")
        rest = [c for c in candidates if c not in failed]
        outcomes = dict(zip(rest, self._finals(rest, rounds, deadline) if rest else (), strict=True))
        return [failed.get(c) or outcomes[c] for c in candidates]

    def _finals(self, candidates: Sequence[Candidate], rounds: int, deadline: float | None) -> list[Outcome]:
        limit_s = self._limits[1] + self._run_limit_s(candidates)
        self._ensure_loaded()
        try:
            outcomes: list[Outcome] = self._ask(
                "finals", [c.key for c in candidates], rounds, deadline, limit_s=limit_s
            )
        except Exception:  # what it leaves behind is not to be trusted
            self._end()
            raise
        return outcomes

    def _ruinous(self, candidates: Sequence[Candidate], rounds: int) -> dict[Candidate, Outcome]:
        """Those that do not come through finals by themselves, all rounds of them whatever the deadline, with what
        became of them. What keeps another worker from taking up the problem is no candidate's fault, and is raised."""
        failed = {}
        for candidate in candidates:
            self._ensure_loaded()
            try:
                self._finals([candidate], rounds, None)
            except AutodispatchError as cause:
                status = cause.status if isinstance(cause, WorkerGoneError) else "launch_failed"
                failed[candidate] = Outcome(Check(status, f"in the finals: {cause}"))
        return failed

    def _run_limit_s(self, candidates: Sequence[Candidate]) -> float:
        """Seconds for launches by the dozen, of which the cost model knows roughly how long each takes."""
        assert self._problem is not None
        predicted = sum(predict(c, self._problem, self.device).total for c in candidates)
        return self._limits[2] * len(candidates) + _PREDICTED_LAUNCHES * predicted

    def unload(self) -> None:
        self._problem = None
        if self._process is not None:
            try:
                self._ask("unload", limit_s=self._limits[0])
            except AutodispatchError:
                self._end()

    def close(self) -> None:
        self._closed = True
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
            try:
                self._ask("load", self._problem, [], limit_s=self._limits[0])
            except Exception as cause:
                self._end()  # it is there, but has nothing loaded
                if isinstance(cause, MemoryError):
                    raise AutodispatchError(f"another worker must have memory for {self._problem} ({cause})") from cause
                raise

    def _ask(self, request: str, *arguments: Any, limit_s: float) -> Any:
        """The worker's answer. Raises its exception, or WorkerGoneError when it has none in time."""
        connection = self._connected()
        try:
            connection.send((request, arguments))
            answer = (
                connection.recv()
                if connection.poll(limit_s)
                else WorkerGoneError("timeout", f"{request}: over {limit_s:.3g} s")
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
        if self._closed:
            raise AutodispatchError("the runner is closed")
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
        "screen": lambda key, best_us, deadline: runner.screen(registry.parse(*key), best_us, deadline),
        "finals": lambda keys, rounds, deadline: runner.finals(candidates(keys), rounds, deadline),
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


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, whatever a candidate does meanwhile."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(arguments: Sequence[str]) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    fd, factory, kind, index = arguments
    module, name = factory.split(":")
    with Connection(int(fd)) as connection:
        serve(connection, *getattr(importlib.import_module(module), name)(kind, int(index)))
