"""Many problems: tuned on one device, or on several side by side, of which equal ones share them out among them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from autodispatch.device import DeviceInfo, default_device
from autodispatch.problem import Problem
from autodispatch.records import DecisionRecord
from autodispatch.settings import Settings
from autodispatch.store import TuningStore
from autodispatch.tuner import Progress, Tuner
from autodispatch.worker import runner_for


def in_order_of_need(tuners: Sequence[Tuner], problems: Iterable[Problem], effort: str) -> list[Problem]:
    """The problems that are not tuned on all devices, those without any decision first."""
    todo = [p for p in problems if not all(t.is_tuned(p, effort) for t in tuners)]
    return sorted(todo, key=lambda p: all(t.has_decision(p) for t in tuners))


def tune_side_by_side(
    tuners: Sequence[Tuner], problems: Iterable[Problem], tune_one: Callable[[Tuner, Problem], None]
) -> None:
    """Calls `tune_one` for every problem and every kind of device, in one thread per tuner; alone, in this one.

    Devices of one key are equal: a problem is tuned on one of them. What `tune_one` raises ends all, and closes the
    tuners.
    """
    todo: dict[str, queue.SimpleQueue[Problem]] = {t.device.key: queue.SimpleQueue() for t in tuners}
    for problem in problems:
        for waiting in todo.values():
            waiting.put(problem)

    def work(tuner: Tuner) -> None:
        waiting = todo[tuner.device.key]
        while True:
            try:
                problem = waiting.get_nowait()
            except queue.Empty:
                return
            tune_one(tuner, problem)

    if len(tuners) == 1:
        work(tuners[0])
        return
    with ThreadPoolExecutor(len(tuners)) as pool:
        running = [pool.submit(work, tuner) for tuner in tuners]
        try:
            for future in running:
                future.result()
        except BaseException:
            for waiting in todo.values():
                while not waiting.empty():
                    waiting.get_nowait()
            for tuner in tuners:
                tuner.close()
            raise


def tune(
    problems: Iterable[Problem],
    *,
    device: DeviceInfo | None = None,
    database: Path | None = None,
    effort: str = "quick",
    budget_s: float | None = None,
    isolate: bool = True,
    listener: Callable[[Progress], None] | None = None,
) -> list[DecisionRecord]:
    """Tunes problems on a device (the first GPU, or the processor) into the user's database, or the one given.

    `effort` is that of `Tuner.tune`; `budget_s` are seconds for all problems that are not tuned yet, of which those
    that do not get their turn are left out; `isolate` tries the candidates in a process of their own;
    `listener` hears of every step. Raises what `Tuner.tune` raises, and StoreError; what was finished before is stored.
    """
    store = TuningStore(database or Settings.from_environment().database)
    runner = runner_for(device or default_device(), isolate)
    tuner = Tuner(store, runner, command="autodispatch.tune", listener=listener)
    deadline = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    decisions: list[DecisionRecord] = []
    with closing(store), closing(tuner):
        for problem in problems if budget_s is None else in_order_of_need([tuner], problems, effort):
            left_s = deadline - time.monotonic()
            if left_s > 0 or not decisions:
                decisions.append(tuner.tune(problem, effort=effort, budget_s=left_s))
    return decisions
